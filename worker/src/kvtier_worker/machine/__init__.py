"""What this machine offers: libraries, memory limits, ports, RDMA devices. Reads the system, decides nothing."""
