"""A small double of NeMo RL: the places that `refit_transport.integrations.nemo_rl` touches, written for its tests.

Names, parameters, orders of calls and refusals are those of NeMo RL's main branch of August 2026; `test_contract.py`
holds both to the same expectations when `NEMO_RL_SOURCE` names a checkout.
"""

__version__ = "0.6.0+double"
