"""What `flwr run .` runs in the project's folder, and what `privdec run --runtime flower` submits."""

from pathlib import Path

from flower_privdec.flower.apps.client_app import client_app
from flower_privdec.flower.apps.server_app import server_app
from flower_privdec.reporting.plots import save_run_plots

server = server_app(Path(__file__).resolve().parents[2], on_finished=save_run_plots)
client = client_app()
