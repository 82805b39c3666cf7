"""The mod that makes an ordinary ClientApp a peer."""
