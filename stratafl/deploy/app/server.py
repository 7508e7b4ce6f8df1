"""The ServerApp of a root or an aggregator: the whole node, for as long as the run lasts."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from stratafl.deploy.flower import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    serve(grid, str(context.run_config["folder"]))
