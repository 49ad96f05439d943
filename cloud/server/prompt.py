"""An observation as the text that the model reads."""

from headway.v1 import robot_pb2

__all__ = ["observation_text"]


def observation_text(embodiment: str, observation: robot_pb2.Observation) -> str:
    """One line a thing, values with four significant digits, ages where there are any.

        robot diff_drive
        task drive to the goal
        odometry 20ms x=1.25 y=0.5
        actions

    The order is the robot's own, so that the same state always reads the same.
    """
    lines = [f"robot {embodiment}"]
    if observation.task:
        lines.append(f"task {observation.task}")
    for source in observation.state:
        words = [source.name]
        if source.HasField("age"):
            age_ms = source.age.seconds * 1000 + source.age.nanos // 1_000_000
            if age_ms:
                words.append(f"{age_ms}ms")
        words += [f"{named.name}={named.value:.4g}" for named in source.values]
        lines.append(" ".join(words))
    lines.append("actions")
    return "\n".join(lines)
