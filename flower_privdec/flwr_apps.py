"""What `flwr run .` runs in the project's folder, and what `privdec run --runtime flower` submits."""

from pathlib import Path

from flower_privdec.reporting.plots import save_run_plots
from flower_privdec.runtime.flower.client_app import client_app
from flower_privdec.runtime.flower.server_app import server_app

server = server_app(Path(__file__).resolve().parents[1], on_finished=save_run_plots)
client = client_app()
