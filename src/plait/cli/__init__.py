"""The command line: parses options, calls the library, prints results."""
