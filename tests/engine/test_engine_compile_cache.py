"""The compile cache: one compile per key, in the background where one sees it coming."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elche_jax.engine.compile_cache import CompileCache, CompileStats

GIVE_UP = 30  # seconds after which a hang is a failure; never waited for in a good run


@pytest.fixture(autouse=True)
def no_compiler_left():
    yield
    for thread in compilers():
        thread.join(GIVE_UP)
        assert not thread.is_alive()


def compilers():
    return [t for t in threading.enumerate() if t.name == "elche-compile"]


def never():
    raise AssertionError("compiled again")


def counts(cache):
    return cache.stats.hits, cache.stats.misses, cache.stats.ahead


class Build:
    """A build that the test holds up, and that counts its calls."""

    def __init__(self, program="program", error=None):
        self.program, self.error = program, error
        self.calls, self.threads = 0, []
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self):
        self.calls += 1
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.go.wait(GIVE_UP)
        if self.error is not None:
            raise self.error
        return self.program


def in_thread(function, *args):
    """Starts a call in a thread; gives a function that waits for its result."""
    result = []

    def call():
        try:
            result.append(function(*args))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=call)
    thread.start()

    def wait():
        thread.join(GIVE_UP)
        assert not thread.is_alive()
        return result[0]

    return wait


def test_a_program_is_made_once_per_key():
    cache, made = CompileCache(), []

    def build(name):
        return lambda: made.append(name) or f"program {name}"

    assert not cache.ready("a")
    assert [cache.get(key, build(key)) for key in "abaab"] == [f"program {key}" for key in "abaab"]
    assert made == ["a", "b"]
    assert cache.ready("a")
    assert counts(cache) == (3, 2, 0)
    assert cache.stats.seconds > 0
    assert cache.stats.waited_s >= cache.stats.seconds
    assert compilers() == []


def test_nothing_is_counted_before_the_first_request():
    assert CompileCache().stats == CompileStats(0, 0, 0, 0.0, 0.0)


def test_none_is_a_program_like_any_other():
    cache = CompileCache()
    assert cache.get("a", lambda: None) is None
    assert cache.get("a", never) is None
    assert counts(cache) == (1, 1, 0)


def test_two_threads_that_ask_for_one_key_compile_once():
    cache, build = CompileCache(), Build(program=object())
    first = in_thread(cache.get, "a", build)
    assert build.begun.wait(GIVE_UP)
    others = [in_thread(cache.get, "a", never) for _ in range(3)]
    assert not cache.ready("a")
    build.go.set()
    assert {id(wait()) for wait in [first, *others]} == {id(build.program)}
    assert build.calls == 1
    assert cache.stats.hits + cache.stats.misses == 4
    assert cache.stats.ahead == 0


def test_prepare_compiles_in_the_background():
    cache, build = CompileCache(), Build()
    cache.prepare("a", build)  # returns while the build is held up
    assert build.begun.wait(GIVE_UP)
    assert not cache.ready("a")
    build.go.set()
    cache.wait()
    assert build.threads == ["elche-compile"]
    assert cache.ready("a")
    assert counts(cache) == (0, 0, 1)
    assert cache.stats.seconds > 0
    assert cache.stats.waited_s == 0
    assert cache.get("a", never) == "program"
    assert counts(cache) == (1, 0, 1)


def test_preparing_again_changes_nothing():
    cache = CompileCache()
    cache.get("a", lambda: "a")
    cache.prepare("a", never)
    cache.prepare("b", lambda: "b")
    cache.prepare("b", never)
    cache.wait()
    assert (cache.get("a", never), cache.get("b", never)) == ("a", "b")
    assert cache.stats.ahead == 1


def test_a_request_waits_for_the_compile_under_way():
    cache, build = CompileCache(), Build()
    cache.prepare("a", build)
    assert build.begun.wait(GIVE_UP)
    wait = in_thread(cache.get, "a", never)
    build.go.set()
    assert wait() == "program"
    assert build.calls == 1


def test_jobs_are_done_in_order_by_one_thread_that_ends_with_them():
    cache, done, threads = CompileCache(), [], set()

    def job(key):
        done.append(key)
        threads.add(threading.current_thread())

    first = Build()
    cache.prepare(0, first)
    assert first.begun.wait(GIVE_UP)
    (compiler,) = compilers()
    for key in range(1, 5):
        cache.prepare(key, lambda key=key: job(key))
    first.go.set()
    cache.wait()
    assert done == [1, 2, 3, 4]
    assert threads == {compiler}
    compiler.join(GIVE_UP)
    assert not compiler.is_alive()
    cache.prepare(5, lambda: job(5))  # and another comes when there is more
    cache.wait()
    assert done[-1] == 5
    assert cache.stats.ahead == 6


def test_a_program_that_failed_in_the_background_is_compiled_when_it_is_asked_for():
    def failing_compile():
        raise MemoryError("does not fit")

    cache = CompileCache()
    cache.prepare("a", failing_compile)
    cache.wait()
    cache.prepare("a", never)  # not again and again
    cache.wait()
    assert not cache.ready("a")
    assert cache.stats.ahead == 0
    with pytest.raises(MemoryError, match="does not fit") as caught:
        cache.get("a", failing_compile)
    assert caught.traceback[-1].name == "failing_compile"
    assert cache.get("a", lambda: "a") == "a" and cache.ready("a")


def test_an_error_does_not_stop_the_background_thread():
    cache, build = CompileCache(), Build(error=ValueError("no"))
    cache.prepare("a", build)
    cache.prepare("b", lambda: "b")
    build.go.set()
    cache.wait()
    assert cache.get("b", never) == "b"


@pytest.mark.parametrize("ahead", ["begin", "prepare"])
def test_a_compile_that_cannot_be_recorded_does_not_stop_the_background_thread(ahead, caplog):
    def full(key, seconds, ahead):
        raise OSError("disk full")

    cache, build = CompileCache(full), Build()
    getattr(cache, ahead)("a", build)
    assert build.begun.wait(GIVE_UP)
    cache.prepare("b", lambda: "b")
    build.go.set()
    for thread in compilers():
        thread.join(GIVE_UP)
    assert cache.get("a", never) == "program"
    assert cache.ready("b")
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == 2 * [
        "elche: a program that was compiled in the background could not be recorded "
        "(OSError: disk full)."
    ]
    with pytest.raises(OSError, match="disk full"):  # the loop's own
        cache.get("c", lambda: "c")
    assert cache.get("c", never) == "c"


def test_after_an_error_the_next_request_tries_anew():
    cache = CompileCache()
    with pytest.raises(KeyboardInterrupt):
        cache.get("a", Interrupted())
    assert cache.get("a", lambda: "a") == "a"

    build = Build(error=OSError("full"))
    build.go.set()
    cache.prepare("b", build)
    cache.wait()
    with pytest.raises(OSError, match="full"):
        cache.get("b", build)
    assert not cache.ready("b")
    cache.prepare("b", lambda: "b")
    cache.wait()
    assert cache.get("b", never) == "b"


class Interrupted:
    def __call__(self):
        raise KeyboardInterrupt


def test_who_waits_for_a_compile_that_fails_gets_its_error():
    cache, build = CompileCache(), Build(error=OSError("full"))
    cache.prepare("a", build)
    assert build.begun.wait(GIVE_UP)
    waits = [in_thread(cache.get, "a", lambda: "later") for _ in range(2)]
    build.go.set()
    results = [wait() for wait in waits]
    # the second may have come after the first had taken the error with it
    assert str(results[0]) == "full" or str(results[1]) == "full"
    assert {str(result) for result in results} <= {"full", "later"}


def test_real_programs_can_be_compiled_in_the_background():
    cache, x = CompileCache(), jax.ShapeDtypeStruct((3,), jnp.float32)
    for scale in (2, 3):
        scaled = jax.jit(lambda x, scale=scale: x * scale)
        cache.prepare(scale, lambda f=scaled: f.lower(x).compile())
    one = np.ones(3, np.float32)
    np.testing.assert_array_equal(cache.get(2, never)(one), [2, 2, 2])
    np.testing.assert_array_equal(cache.get(3, never)(one), [3, 3, 3])


def test_what_is_begun_is_compiled_beside_what_is_asked_for():
    cache, first, second = CompileCache(), Build("first"), Build("second")
    cache.begin("first", first)
    asked = in_thread(cache.get, "second", second)
    assert first.begun.wait(GIVE_UP) and second.begun.wait(GIVE_UP)  # both at once
    first.go.set()
    second.go.set()
    assert asked() == "second"
    assert cache.get("first", never) == "first"
    cache.begin("first", never)
    assert first.calls == 1 and cache.stats.ahead == 0


def test_an_error_of_what_was_begun_is_raised_where_it_is_asked_for():
    cache, build = CompileCache(), Build(error=RuntimeError("no"))
    build.go.set()
    cache.begin("a", build)
    with pytest.raises(RuntimeError, match="no"):
        cache.get("a", never)
    assert cache.get("a", lambda: "now") == "now"


def test_what_is_waited_for_comes_before_what_is_prepared():
    cache, needed, later, last = CompileCache(), Build("needed"), Build("later"), Build("last")
    asked = in_thread(cache.get, "needed", needed)
    assert needed.begun.wait(GIVE_UP)
    cache.prepare("later", later)
    cache.prepare("last", last)
    taken = in_thread(cache.get, "later", later)  # by whoever needs it, not by the background
    assert later.begun.wait(GIVE_UP)
    assert later.threads != ["elche-compile"] and not last.begun.is_set()
    for build in (needed, later, last):
        build.go.set()
    assert (asked(), taken()) == ("needed", "later")
    cache.wait()
    assert last.threads == ["elche-compile"]
    assert counts(cache) == (0, 2, 1)


def test_what_was_prepared_is_let_go_of_too():
    cache, held, old, new = CompileCache(), Build(), Build("old"), Build("new")
    cache.prepare("held", held)
    assert held.begun.wait(GIVE_UP)
    cache.prepare("a", old)
    waiting = in_thread(cache.wait)
    cache.clear()
    new.go.set()
    assert cache.get("a", new) == "new"
    held.go.set()
    waiting()
    assert old.calls == 0


class Interleaved(threading.Condition):
    """Lets somebody else have the lock as soon as it is free."""

    other = None

    def __exit__(self, *raised):
        super().__exit__(*raised)
        other, self.other = self.other, None
        if other is not None:
            other()


def test_a_request_for_what_is_dropped_meanwhile_gets_a_program():
    cache, held = CompileCache(), Build("held")
    cache._changed = Interleaved()
    cache.prepare("held", held)
    assert held.begun.wait(GIVE_UP)
    cache.prepare("a", lambda: "prepared")
    cache._changed.other = cache.clear
    assert cache.get("a", lambda: "asked for") == "prepared"
    held.go.set()


def test_a_program_is_ready_as_soon_as_a_wait_for_it_may_end():
    cache, build, seen = CompileCache(), Build(), []

    def wait():
        cache.wait()
        seen.append(cache.ready("key"))

    cache.prepare("key", build)
    waiting = [threading.Thread(target=wait) for _ in range(4)]
    for thread in waiting:
        thread.start()
    build.go.set()
    for thread in waiting:
        thread.join(GIVE_UP)
    assert seen == [True] * 4


def test_a_build_that_is_interrupted_is_built_by_the_next_request():
    class Torn:
        """Counts a build in a thread that is interrupted there."""

        def __getattr__(self, name):
            raise KeyboardInterrupt

    cache = CompileCache()
    stats, cache._stats = cache._stats, Torn()
    with pytest.raises(KeyboardInterrupt):
        cache.get("key", lambda: "never seen")
    cache._stats = stats
    assert cache.get("key", lambda: "built") == "built"


@pytest.mark.parametrize("ahead", ["begin", "prepare"])
def test_a_thread_that_cannot_be_started_leaves_nothing_that_is_waited_for(ahead, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    cache = CompileCache()
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start"):
        patched.setattr(threading.Thread, "start", start)
        getattr(cache, ahead)("key", never)
    cache.wait()
    assert cache.get("key", lambda: "built") == "built"
    cache.prepare("other", lambda: "later")
    cache.wait()
    assert cache.ready("other")


@pytest.mark.parametrize("ahead", ["begin", "prepare"])
def test_a_program_belongs_to_the_settings_of_jax(ahead):
    cache = CompileCache()
    with jax.default_matmul_precision("highest"):
        getattr(cache, ahead)("key", lambda: jax.config.jax_default_matmul_precision)
        assert cache.get("key", never) == "highest"
        assert cache.ready("key")
    assert not cache.ready("key")
    assert cache.get("key", lambda: "another") == "another"
    with jax.default_matmul_precision("highest"):
        assert cache.get("key", never) == "highest"
