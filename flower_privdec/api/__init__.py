"""What `import flower_privdec` offers: scenarios, runs, plans and comparisons from Python."""
