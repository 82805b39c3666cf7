"""FedDeper as ordinary Flower classes, around a model and data of one's own."""
