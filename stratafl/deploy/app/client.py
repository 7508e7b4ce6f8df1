"""The ClientApp that a Flower app must name. Sites run theirs in a process that stays: see stratafl.deploy.inbox."""

from flwr.clientapp import ClientApp

app = ClientApp()
