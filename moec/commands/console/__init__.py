"""What commands read from and show to whoever types them."""
