"""The command line, `privdec`."""
