"""What is sent: plans, sources, transforms, packing and the digest. Knows no transport, no engine and no Ray.

Names are imported from the modules: a plan is read by processes, such as the coordinator, that would import torch for nothing.
"""
