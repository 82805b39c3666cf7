"""What an operator gives to devices, and what a device looks at before it starts a peer."""
