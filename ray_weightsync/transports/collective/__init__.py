"""The collective transport: the sender broadcasts a plan's bytes to every engine worker over a private group of theirs.

The sender binds a `rendezvous.RendezvousServer`; Ray carries its `Rendezvous` to the workers in the update's payload. A
`sender.BroadcastSender` packs and broadcasts, a `receiver.CollectiveReceiver` in each worker joins and hands over. What differs between
NCCL and gloo is in `communicator`; all else is one code path. Nothing here knows Ray.
"""
