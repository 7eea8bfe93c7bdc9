"""What tests of the operator need: a real control plane, nodes without containers, fakes of our ports.

Nothing here is imported by the operator itself.
"""
