"""python docs/howto/write_a_transport.py, and pytest docs/howto/write_a_transport.py"""

from refit_transport.testing.contracts import TransportContract
from refit_transport.transports.nccl_reshard import NcclReshard


class SmallestFirst:
    """Sends tensors in two waves, the smallest half first, each by a plan and a schedule of its own."""

    def __init__(self, job, tensors):
        sizes = {spec.name: spec.box.numel for spec in job.source.tensors}
        ordered = sorted(tensors, key=lambda name: (sizes[name], name))
        middle = (len(ordered) + 1) // 2
        waves = (ordered[:middle], ordered[middle:])
        self.waves = [NcclReshard(job, tuple(wave)) for wave in waves if wave]

    def digest(self):
        return "+".join(wave.digest() for wave in self.waves)

    def traffic(self):
        from refit_transport.scheduling.schedule import total_traffic

        return total_traffic(wave.traffic() for wave in self.waves)

    def check(self):
        for wave in self.waves:
            wave.check()

    def footprint(self):
        from refit_transport.transports.base import Footprint

        # One wave after the other uses the same slots, so the largest counts.
        found = [wave.footprint() for wave in self.waves]
        staging = {rank: max(each.staging_bytes[rank] for each in found) for rank in found[0].staging_bytes}
        return Footprint(sum(each.payloads for each in found), max(each.slot_bytes for each in found), staging)

    def legs(self):
        for wave in self.waves:
            yield from wave.legs()

    def run(self, endpoint, fabric, *, deadline):
        from refit_transport.fabrics.base import Spent

        spent = Spent()
        for wave in self.waves:
            spent.add(wave.run(endpoint, fabric, deadline=deadline))
        return spent


class TestSmallestFirst(TransportContract):
    transport_class = SmallestFirst


class WithoutTheLast(SmallestFirst):
    """A mistake: the second wave never runs."""

    def run(self, endpoint, fabric, *, deadline):
        return self.waves[0].run(endpoint, fabric, deadline=deadline)


if __name__ == "__main__":
    TestSmallestFirst().test_weights_follow_training()
    print("SmallestFirst: weights follow training in every topology")
    suite = type("Suite", (TransportContract,), {"transport_class": WithoutTheLast})()
    try:
        suite.test_weights_follow_training()
    except AssertionError as error:
        print(f"WithoutTheLast: {str(error)[:96]} ...")
