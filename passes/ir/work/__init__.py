"""What an op says of its work: operations, bytes, and what backward keeps."""
