"""What happens in a world while time passes: pods come and go, masters elect, drains end, things break. Pure."""

from __future__ import annotations

from kvtier_operator import labels
from kvtier_operator.observed import WORKLOAD_KINDS, Component, DrainPhase, Manifest, ObjectRef
from kvtier_operator.testing.world import World
from kvtier_operator.testing.world_records import WorldPod, template_of

TICK_S = 5.0


def tick(world: World) -> None:
    """Let the controllers, the masters and chance work for a moment."""
    world.now += TICK_S
    if world.cluster.metadata.deleting and not world.cluster.metadata.finalizers:
        world.objects.clear()
        world.pods.clear()
        world.gone = True
        return
    _stumble(world)
    _keep_pods(world)
    _elect(world)
    for drain in (*world.drains.values(), *world.forgotten.values()):
        drain.lasts -= 1
        if drain.phase is DrainPhase.RUNNING and drain.lasts <= 0:
            drain.phase = drain.ends
    there = {pod.uid for pod in world.pods.values()}
    world.drains = {name: drain for name, drain in world.drains.items() if drain.uid in there}
    world.forgotten = {
        uid: drain for uid, drain in world.forgotten.items() if uid in there and drain.phase is not DrainPhase.FAILED
    }


def _stumble(world: World) -> None:
    for pod in list(world.pods.values()):
        if pod.ready and world.happens(world.faults.pod_dies):
            del world.pods[pod.name]
    if world.happens(world.faults.leader_lost):
        world.leader_name = ""
    if world.objects and world.happens(world.faults.edit):
        ref = world.chance.choice(sorted(world.objects))
        if ref.kind in WORKLOAD_KINDS:
            world.objects[ref].live["metadata"]["labels"].pop(labels.PART_OF, None)
        else:
            world.remove(ref)


def _keep_pods(world: World) -> None:
    for pod in list(world.pods.values()):
        if pod.leaves:
            pod.leaves -= 1
            if not pod.leaves:
                del world.pods[pod.name]
        elif pod.matures:
            _mature(world, pod)
        elif pod.failure and pod.revision not in world.bad_revisions and world.happens(0.3):
            pod.failure = ""
    for ref, item in world.objects.items():
        if ref.kind in WORKLOAD_KINDS:
            _keep_workload(world, ref, item.live)


def _mature(world: World, pod: WorldPod) -> None:
    pod.matures -= 1
    if not pod.matures and (pod.revision in world.bad_revisions or world.happens(world.faults.pod_fails)):
        pod.failure = "CrashLoopBackOff"


def _keep_workload(world: World, ref: ObjectRef, live: Manifest) -> None:
    own, size = live["spec"]["template"]["metadata"]["labels"], live["spec"]["replicas"]
    for pod in world.pods.values():
        if pod.workload == ref and pod.slot >= size and not pod.leaves:
            pod.leaves = 2
    for slot in range(size):
        name = f"{ref.name}-{slot}"
        if name not in world.pods:
            group = own.get(labels.ROLE) or own.get(labels.POOL) or ""
            component = Component(own[labels.COMPONENT])
            revision, ticks = own.get(labels.REVISION, ""), 1 + world.chance.randrange(world.slow)
            world.pods[name] = WorldPod(
                name, world.next_uid(), ref, component, group, slot, revision, template_of(live), ticks
            )
    if _rolls_by_itself(ref, live):
        _roll(world, ref, live)


def _roll(world: World, ref: ObjectRef, live: Manifest) -> None:
    """Replace one outdated pod, as Kubernetes does, while all others are ready."""
    pods = [pod for pod in world.pods.values() if pod.workload == ref]
    outdated = [pod for pod in pods if pod.template != template_of(live)]
    if outdated and all(pod.ready for pod in pods):
        max(outdated, key=lambda pod: pod.slot).leaves = 2


def _elect(world: World) -> None:
    managed = world.cluster.coordination.managed
    alive = sum(pod.ready for pod in world.of(Component.ETCD))
    masters = [pod for pod in world.of(Component.MASTER) if pod.ready]
    if managed is not None and alive < managed.replicas // 2 + 1:
        world.leader_name = ""
        return
    leader = world.leading
    for pod in masters:
        pod.caught_up = leader is not None and (pod.caught_up or world.happens(0.5))
    if leader is not None:
        return
    world.leader_name = ""
    world.election += 1
    if masters and world.election > 1:
        world.election = 0
        world.view_version += 1
        world.leader_name = world.chance.choice(masters).name
        world.forgotten.clear()
        for drain in world.drains.values():
            if drain.phase is not DrainPhase.UNSUPPORTED:
                drain.phase = DrainPhase.FAILED  # the new leader has no jobs of the old one


def _rolls_by_itself(ref: ObjectRef, live: Manifest) -> bool:
    return ref.kind == "Deployment" or live["spec"].get("updateStrategy") == {"type": "RollingUpdate"}
