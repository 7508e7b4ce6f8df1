from tests.runs.conftest import server

__all__ = ["server"]
