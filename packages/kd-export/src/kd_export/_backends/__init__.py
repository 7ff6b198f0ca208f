"""The formats, one module each, imported when a file name asks for them."""
