"""The worker processes of one engine: started, reached over ZeroMQ, watched and ended. Imports no torch."""

from kvtier_worker.adapters.zmq_workers.group import WORKER_COMMAND, Launch, ZmqWorkerGroup

__all__ = ["WORKER_COMMAND", "Launch", "ZmqWorkerGroup"]
