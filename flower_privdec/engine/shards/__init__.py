"""One cohort in shards: processes, on one machine or several, that each host a part of the rows and swap the rest.

    rendezvous          the shards find each other
    process_group       their connections, by gloo, and the rows on their way
    communication_plan  which rows cross between which shards in an exchange
    shard_engine        the engine of one shard

Flower's sharded mode runs one shard on each SuperNode. Numbers may differ from the engine's in their last bits, since
each shard adds in an order of its own.
"""
