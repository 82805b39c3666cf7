"""The ClientApp and ServerApp that run a scenario under Flower."""
