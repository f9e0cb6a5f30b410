"""The switch that keeps cuDNN out of eager attention is one for the whole process."""

import threading

import pytest
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from regard.kernels.fused import _without_cudnn


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_stays_off_until_the_last_thread_leaves(before: bool) -> None:
    seen, entered, left = [], threading.Event(), threading.Event()
    was = cudnn_sdp_enabled()
    enable_cudnn_sdp(before)

    def other() -> None:
        with _without_cudnn:
            entered.set()
            left.wait()
            seen.append(cudnn_sdp_enabled())

    try:
        thread = threading.Thread(target=other)
        with _without_cudnn:
            thread.start()
            entered.wait()
        left.set()
        thread.join()
        assert seen == [False] and cudnn_sdp_enabled() == before
    finally:
        enable_cudnn_sdp(was)
