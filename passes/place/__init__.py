"""Places a Program on its ranks: degrees, meshes, layouts, and the conversions between layouts."""
