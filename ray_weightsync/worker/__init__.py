"""What runs inside an engine's workers: the record of an update, the agreement between workers, the ``"rws"`` backend."""
