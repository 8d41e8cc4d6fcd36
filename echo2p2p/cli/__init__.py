"""The command line: one thin module per command; it parses, calls and prints."""
