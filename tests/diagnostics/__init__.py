"""The pages of the diagnostics, one for each code; installed as `moec.pages`, which `moec explain` reads."""
