"""The command line. Thin: parse, call, print. Nothing heavy is imported before the input is found right."""
