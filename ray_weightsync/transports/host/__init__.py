"""The host transport: sealed snapshots in shared memory, written once a node and read by every engine worker on it.

One `store.SnapshotStore` per node creates, seals and unlinks the files; the trainer's `writer.SlotWriter` fills them; each engine
worker's `receiver.HostReceiver` maps them. `actor` is the store's thin Ray shell, `relay` the way of a sealed snapshot to another node;
nothing else here knows Ray.
"""
