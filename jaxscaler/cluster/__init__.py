"""What a plan is made for: devices, the links between them, and the meshes they can form."""

from jaxscaler.cluster.cluster import Cluster, Level
from jaxscaler.cluster.curves import Curve
from jaxscaler.cluster.devices import Device, find_device, known_devices
from jaxscaler.cluster.links import Link
from jaxscaler.cluster.mesh import Axis, Mesh, Part, candidate_meshes, device_grid, join_axes
from jaxscaler.cluster.profile import Profile, calibrated

__all__ = [
    "Axis",
    "Cluster",
    "Curve",
    "Device",
    "Level",
    "Link",
    "Mesh",
    "Part",
    "Profile",
    "calibrated",
    "candidate_meshes",
    "device_grid",
    "find_device",
    "join_axes",
    "known_devices",
]
