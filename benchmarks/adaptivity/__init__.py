"""What adapts while a model trains, on a routing trace."""
