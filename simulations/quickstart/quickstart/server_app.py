"""The ServerApp: it holds no model and averages nothing; it requests work of the nodes and routes messages."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_privdec.flower.apps.server_app import scenario_strategy
from flower_privdec.flower.error_formatting import one_line_failure
from flower_privdec.reporting.plots import save_run_plots

app = ServerApp()


@app.main()
@one_line_failure()
def main(grid: Grid, context: Context) -> None:
    """Run the scenario that the run-config names."""
    strategy = scenario_strategy(grid, context, folder=Path(__file__).resolve().parents[1])
    strategy.start(grid)
    save_run_plots(strategy.out)
