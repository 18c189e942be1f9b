"""The fixtures of observe_servers, for every test of this room."""

from observe_servers import serve, serve_raw

__all__ = ["serve", "serve_raw"]
