"""Where time and concurrency live: scheduler, admission, transfers, the worker's runtime."""
