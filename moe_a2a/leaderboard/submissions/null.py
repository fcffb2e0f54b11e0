"""Does nothing. Its time is what the harness itself takes: two barriers, a call, the device's synchronisation."""


def custom_kernel(data):
    return None
