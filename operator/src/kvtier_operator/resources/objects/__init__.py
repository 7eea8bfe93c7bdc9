"""Builders of a cluster's Kubernetes objects; `children` is the door. Pure.

Every object is a complete intent for server-side apply: each value that we care for, no default of the API server, and
nothing of the operator's own version, so that an upgrade of the operator restarts no pod.
"""
