"""What is learned: the loss of one example, and the metrics by which models are tried."""
