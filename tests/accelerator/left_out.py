"""Tests of the project that `--device sim` leaves out, and why. The others run on both."""

BUDGET = "is about the one memory that a CPU has, and its budget"
NO_KERNEL = "torch has no such operator for devices from outside torch"
FORWARD_AD = "torch's forward mode reads the memory of such a device itself"
DEVICE_BITS = "compares bits of the device's own update with those of the host's"
DEFAULT_DEVICE = "sets a default device of its own"
FORKS = "forks the process, whose threads of the device do not come along"
ANOTHER_PROCESS = "starts a process that knows nothing of the device"

LEFT_OUT = {
    "tests/run/test_beside_the_gate.py::test_a_default_device_is_of_no_concern": DEFAULT_DEVICE,
}
