"""What stands before the launcher: makes its surroundings, and then becomes it.

    python -I -S setting.py SURROUNDINGS OUTPUT FOLDER command ...      (names of `drawn.plan`)

Run by its path and with the standard library only. A background job needs a foreground one: there it stays, and returns
the launcher's exit code.
"""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import termios

FEW_FILES = 128


def ignore_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def ignore_sigpipe():
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def heed_sigpipe():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and would hand that down


def set_stray_variables():
    """As a shell has that was itself started by a launcher, or in which somebody tried something."""
    os.environ.update(RINGTRAIN_RANK="3", RINGTRAIN_SIZE="7", RINGTRAIN_LOCAL_RANK="3", RINGTRAIN_LOCAL_SIZE="7",
                      RINGTRAIN_LAUNCHER="ringtrainrun-of-another-job", RINGTRAIN_SLOTS="9", OMPI_COMM_WORLD_RANK="3",
                      OMPI_COMM_WORLD_SIZE="7", OMPI_COMM_WORLD_LOCAL_RANK="3", PMI_RANK="3", PMI_SIZE="7")  # fmt: skip


def unset_home():
    os.environ.pop("HOME", None)


def lose_folder():
    folder = f"{sys.argv[3]}/gone"
    os.mkdir(folder)
    os.chdir(folder)
    os.rmdir(folder)


def limit_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))


SETTINGS = {
    "plain": lambda: None,
    "nohup": ignore_hangup,
    "no-sigpipe": ignore_sigpipe,
    "background": lambda: None,  # see main
    "stray": set_stray_variables,
    "no-home": unset_home,
    "no-folder": lose_folder,
    "umask": lambda: os.umask(0o077),
    "few-files": limit_files,
    "within": lambda: None,  # its command line says it
}


def take_terminal():
    """Makes the terminal on stdin that of a session of this process, as a login does."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def stop_background_output():
    """stty tostop."""
    modes = termios.tcgetattr(0)
    modes[3] |= termios.TOSTOP
    termios.tcsetattr(0, termios.TCSANOW, modes)


def fill_soon(folder):
    """Puts a disk of 64 KiB there."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", folder], check=True)


def main(surroundings, output, folder, *command):
    """Becomes the command, or returns its exit code."""
    heed_sigpipe()
    SETTINGS[surroundings]()
    if output == "full-folder":
        fill_soon(f"{folder}/output")
    if output == "terminal":
        take_terminal()
    if output == "closed":
        os.closerange(1, 3)
    if surroundings != "background":
        os.execvp(command[0], command)
    stop_background_output()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.execvp(command[0], command)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
