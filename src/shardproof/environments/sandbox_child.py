"""The sandbox's own process: gives up every right that the code must not have, then runs the code.

Run as a script by `sandbox.py`, without the package: it may import the standard library alone, and little of it, since
every call of the interpreter waits for it. What it gives up cannot be taken back, by this process or by its threads.
"""

import ctypes
import marshal
import os
import resource
import sys

FAILED = 97  # exit status: a limit could not be set, and the code was not run
BEGUN = b"\x06"  # the first byte of the output: every limit holds, and what follows is the code's
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SIGKILL = 1, 22, 38, 9
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _PATH_BENEATH = 444, 445, 446, 1
_CAPABILITIES_3, _CAPSET = 0x20080522, {"x86_64": 126, "aarch64": 91}
_ONLY_TREE = 0x400  # compile's flag for a syntax tree


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(what, result):
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _call(what, number, *arguments):
    return _checked(what, _libc.syscall(number, *arguments))


def confine(plan):
    """Set every limit of the plan; raises OSError that names the first that cannot be set."""
    _checked("prctl", _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0))
    if os.getppid() != plan["parent"]:
        raise OSError("the worker is gone")
    os.umask(0o077)
    for name, limit in plan["limits"].items():
        most = resource.getrlimit(getattr(resource, name))[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        # Past the soft limit of processor time comes a signal that says so; the hard one kills without a word.
        hard = limit if most != resource.RLIM_INFINITY else limit + (name == "RLIMIT_CPU")
        resource.setrlimit(getattr(resource, name), (limit, hard))
    # A process of root without capabilities is one that owns root's files, no more.
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)()
    _call("capset", _CAPSET[plan["machine"]], header, none)
    _checked("no_new_privs", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _restrict_files(plan)
    _restrict_calls(plan)


def _restrict_files(plan):
    ruleset = plan["ruleset"]
    rules = _call("Landlock", _CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0)
    for path, of_folder, of_file in plan["rights"]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this machine
            continue
        rights = of_folder if os.path.isdir(path) else of_file
        rule = _PathBeneath(rights, place)
        if rights:
            _call(f"Landlock ({path})", _ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(rule), 0)
        os.close(place)
    _call("Landlock", _RESTRICT_SELF, rules, 0)
    os.close(rules)


def _restrict_calls(plan):
    own = os.getpid().to_bytes(4, "little")
    program = plan["filter"].replace(plan["own"], own)
    buffer = ctypes.create_string_buffer(program, len(program))
    described = _Program(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    _checked("seccomp", _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(described), 0, 0))


def run(source, name="__main__", before="", behind=None):
    """Run the code, and print the value of its last line if that is an expression, as a notebook does.

    With `behind`, which may be empty, it is a script, whose values are not printed. What runs before and behind it is
    compiled by itself: no end of the code, such as a line that goes on, makes a part of the one what the other says.
    """
    import _ast

    main = type(sys)(name)
    main.__dict__.update(__builtins__=__builtins__, exit=sys.exit, quit=sys.exit)
    sys.modules["__main__"] = sys.modules[name] = main
    try:
        tree = compile(source, "<code>", "exec", _ONLY_TREE, dont_inherit=True)
        has_value = behind is None and tree.body and isinstance(tree.body[-1], _ast.Expr)
        last = tree.body.pop() if has_value else None
        parts = [(before, "<before>"), (tree, "<code>"), (behind, "<behind>")]
        # All of them first, and by this function of its own: the code may put others in the place of builtins.
        execute = exec
        for part in [compile(part, name, "exec", dont_inherit=True) for part, name in parts if part]:
            execute(part, main.__dict__)
        if last is not None:
            expression = _ast.Expression(body=last.value)
            value = eval(compile(expression, "<code>", "eval", dont_inherit=True), main.__dict__)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        _show(error, source)
        sys.exit(1)


def _show(error, source):
    """Print the error as Python does, with the lines of the code alone: those of libraries differ between machines."""
    sys.stdout.flush()
    try:
        import linecache
        import traceback

        linecache.cache["<code>"] = (
            len(source),
            None,
            [f"{line}\n" for line in source.split("\n")],
            "<code>",
        )
        shown = traceback.TracebackException.from_exception(error)
        errors = [shown]
        while (before := errors[-1].__cause__ or errors[-1].__context__) is not None:
            errors.append(before)
        for each in errors:
            lines = [line for line in each.stack if line.filename == "<code>"]
            each.stack = traceback.StackSummary.from_list(lines[-20:])
        print("".join(shown.format()), end="", file=sys.stderr)
    except MemoryError:
        os.write(2, b"MemoryError\n")


def _give_input(data):
    """Let the code read these bytes from its standard input."""
    if not data:
        return
    file = os.memfd_create("input", 0)
    while data:
        data = data[os.write(file, data) :]
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
    # The interpreter's own stream has read the plan to its end.
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def main():
    plan = marshal.load(sys.stdin.buffer)
    script = plan["script"]
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    if script is not None:
        os.dup2(nothing, 2)
        _give_input(script[0])
    os.close(nothing)
    try:
        confine(plan)
    except OSError as error:
        os.write(1, str(error.strerror or error).encode())
        os._exit(FAILED)
    os.write(1, BEGUN)
    sys.argv[:] = ["<code>"]
    sys.path += plan["path"]
    for stream in (sys.stdout, sys.stderr):
        # Line by line: in the order in which it was printed, and there even if the code is stopped. Not of a script,
        # whose output alone is kept: a system call for each line would take longer than what it computes.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=script is None)
    if script is None:
        run(plan["code"])
    else:
        run(plan["code"], *script[1:])


if __name__ == "__main__":
    main()
