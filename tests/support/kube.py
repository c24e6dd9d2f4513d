"""Run a real one-node Kubernetes on one Linux machine: kubelet, containerd and pods, built from Debian's source.

All daemons and pods run in their own PID and mount namespaces. The death of the first process there ends them all, no
mount is visible outside, and the fixed folders that they write to (/run, /var/lib, /var/log) are private.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import platform
import random
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet")
BINARIES = (*PROGRAMS, "pause")
RUN_PACKAGES = {  # each with the file of it that is used
    "busybox-static": "/bin/busybox",
    "containerd": "/usr/bin/containerd",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "etcd-server": "/usr/bin/etcd",
    "openssl": "/usr/bin/openssl",
    "runc": "/usr/sbin/runc",
}
BUILD_PACKAGES = ("dpkg-dev", "gcc", "golang-go", "libc6-dev")
SOURCES = Path("/etc/apt/sources.list.d")
NETWORK = "10.88"
NODE = "localhost"  # the apiserver dials the kubelet by this name
PAUSE_IMAGE = "clusterenv-pause:1"
TEST_IMAGE = "clusterenv-test:latest"
# The kubelet requires these values, a network plugin the last. They see these, while the machine keeps its own.
TUNABLES = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
    "net/ipv4/ip_forward": 1,
}
START_TIMEOUT = 90.0
STOP_TIMEOUT = 30.0


def _call(argv: Sequence[object], **kwargs: Any) -> str:
    """Run a command and return its output; raise with its messages on failure."""
    command = [str(arg) for arg in argv]
    done: subprocess.CompletedProcess[str] = subprocess.run(command, text=True, capture_output=True, **kwargs)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-4000:]
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {said}")
    return done.stdout


def _say(text: str) -> None:
    print(f"kube: {text}", file=sys.stderr, flush=True)


def default_cache() -> Path:
    """Return the folder for built files."""
    return Path(os.environ.get("CLUSTERENV_CACHE") or Path.home() / ".cache/clusterenv")


def build(cache: Path | None = None) -> Path:
    """Return the folder with the binaries; the first call builds them, which takes about ten minutes."""
    cache = cache or default_cache()
    folder, work = cache / "kubernetes", cache / "kubernetes.build"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "kubernetes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(package for package, file in RUN_PACKAGES.items() if not Path(file).exists())
        if all((folder / name).exists() for name in BINARIES):
            return folder
        shutil.rmtree(work, ignore_errors=True)  # of an interrupted build
        try:
            source, version = _source(work)
            _compile(source, version, work / "bin")
            if folder.exists():
                folder.rename(work / "incomplete")
            (work / "bin").rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _apt(*args: str, **kwargs: Any) -> None:
    _say(f"apt-get {' '.join(args)}")
    _call(["apt-get", "-q", "-y", *args], env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, **kwargs)


def _install(packages: Iterable[str]) -> None:
    if missing := list(packages):
        _apt("update")
        _apt("install", "--no-install-recommends", *missing)


def _enable_sources() -> None:
    """Add the deb-src entry of every configured package source, in separate files."""
    stanzas, lines = [], []
    main = SOURCES.parent / "sources.list"
    for path in [*sorted(SOURCES.iterdir()), *([main] if main.exists() else [])]:
        if path.stem == "clusterenv-source":
            continue
        if path.suffix == ".sources":
            found = (stanza.strip() for stanza in re.split(r"\n\s*\n", path.read_text()))
            on = (stanza for stanza in found if not re.search(r"(?im)^Enabled:\s*no", stanza))
            new = (re.subn(r"(?im)^Types:\s*deb\s*$", "Types: deb-src", stanza) for stanza in on)
            stanzas += [stanza for stanza, changed in new if changed]
        elif path.suffix == ".list":
            lines += [f"deb-src {rest}" for rest in re.findall(r"(?m)^\s*deb\s(.*)", path.read_text())]
    for suffix, parts in ((".sources", stanzas), (".list", lines)):
        if parts:
            (SOURCES / f"clusterenv-source{suffix}").write_text("\n\n".join(parts) + "\n")


def _source(work: Path) -> tuple[Path, str]:
    """Download and unpack the source where Go looks for it; return its folder and version."""
    packages = work / "packages"
    packages.mkdir(parents=True)
    _enable_sources()
    _apt("update")
    _apt("install", "--no-install-recommends", *BUILD_PACKAGES)
    _apt("source", "--download-only", "kubernetes", cwd=packages)
    (description,) = packages.glob("*.dsc")
    source = work / "go/src/k8s.io/kubernetes"
    source.parent.mkdir(parents=True)
    _say("unpacking")
    _call(["dpkg-source", "--extract", description, source])
    return source, re.findall(r"\d+\.\d+\.\d+", description.name)[-1]


def _compile(source: Path, version: str, target: Path) -> None:
    """Build the binaries into the target folder, at the lowest priority."""
    work = target.parent
    target.mkdir()
    go = {"GOPATH": f"{work}/go", "GOCACHE": f"{work}/cache", "GOTMPDIR": f"{work}", "GO111MODULE": "off"}
    major, minor, _ = version.split(".")
    facts = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    told = [f"k8s.io/kubernetes/vendor/k8s.io/{package}/version" for package in ("component-base", "client-go/pkg")]
    flags = " ".join(["-s -w", *(f"-X {package}.{key}={value}" for package in told for key, value in facts.items())])

    def run(*argv: object, cgo: bool = False) -> None:
        _call(["nice", "-n", "19", *argv], cwd=source, env=os.environ | go | {"CGO_ENABLED": str(int(cgo))})

    _say("generating the OpenAPI table")
    run("go", "build", "-o", work / "openapi-gen", "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
    run(
        work / "openapi-gen",
        *("--input-dirs", ",".join(_api_packages(source))),
        *("--output-package", "k8s.io/kubernetes/pkg/generated/openapi"),
        *("--output-file-base", "zz_generated.openapi"),
        *("--go-header-file", source / "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"),
        *("--report-filename", work / "violations"),
    )
    run("gcc", "-Os", "-static", "-s", "-o", target / "pause", source / "build/pause/linux/pause.c")
    for number, program in enumerate(PROGRAMS, 1):
        _say(f"building {program} ({number} of {len(PROGRAMS)})")
        run("go", "build", "-ldflags", flags, "-o", target / program, f"./cmd/{program}", cgo=program == "kubelet")


def _api_packages(source: Path) -> list[str]:
    """Return the packages whose types belong in the OpenAPI table."""
    others = {"code-generator", "gengo", "kube-openapi", "sample-apiserver", "sample-cli-plugin", "sample-controller"}
    found = []
    for top in sorted(set(os.listdir(source / "vendor/k8s.io")) - others):
        for folder, _, files in os.walk(source / "vendor/k8s.io" / top, followlinks=True):
            code = [Path(folder, name) for name in files if name.endswith(".go") and not name.endswith("_test.go")]
            if any(b"+k8s:openapi-gen=" in path.read_bytes() for path in code):
                found.append(f"k8s.io/kubernetes/{Path(folder).relative_to(source)}")
    return found


def _write_image(path: Path, name: str, entries: Mapping[str, Path | bytes | str | None], **config: Any) -> None:
    """Write an image of one layer. Each entry is a file to copy, bytes, the target of a link, or None for a folder."""

    def add(archive: tarfile.TarFile, at: str, content: Path | bytes | str | None) -> None:
        entry = tarfile.TarInfo(at)
        data = content.read_bytes() if isinstance(content, Path) else content if isinstance(content, bytes) else b""
        entry.size = len(data)
        entry.mode = 0o1777 if at == "tmp" else 0o755
        if content is None:
            entry.type = tarfile.DIRTYPE
        elif isinstance(content, str):
            entry.type, entry.linkname = tarfile.SYMTYPE, content
        archive.addfile(entry, io.BytesIO(data))

    def pack(contents: Mapping[str, Path | bytes | str | None]) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for at, content in contents.items():
                add(archive, at, content)
        return packed.getvalue()

    layer = pack(entries)
    about = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], **config},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [f"docker.io/library/{name}"], "Layers": ["layer.tar"]}]
    parts = {"config.json": json.dumps(about).encode(), "manifest.json": json.dumps(manifest).encode()}
    path.write_bytes(pack({"layer.tar": layer, **parts}))


def _free_ports(count: int) -> list[int]:
    # Not from ports.py: this file also runs as a script that can import only the standard library.
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


class KubeCluster:
    """Context manager: a running cluster; every trace of it is removed on exit, even if this process is killed.

    `image` has only busybox. With `volumes` and `volume_mounts` a pod sees this interpreter, its venv and the project
    under their own paths, read-only, and the folders of `mounts`, writable; none of them may be below /run, /var/lib or
    /var/log. There is no registry: a pod needs ``imagePullPolicy: Never`` or ``IfNotPresent``. Pods can dial
    `host_address`.
    """

    image = TEST_IMAGE

    def __init__(
        self, cache: Path | None = None, mounts: Sequence[Path] = (), users: Sequence[str] = ("guest",)
    ) -> None:
        self._cache = cache
        self._users = users
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: subprocess.Popen[str] | None = None
        project = Path(__file__).absolute().parents[2]
        packages = [path for path in sys.path if Path(path).name == "site-packages"]  # also those of a .pth file
        files = ("/usr", "/etc/ssl", "/etc/ld.so.cache", sys.base_prefix, sys.prefix, *packages, project)
        needed = [Path(path) for path in files]
        read_only = {form: True for path in needed if path.exists() for form in (path, path.resolve())}
        paths = read_only | {path.absolute(): False for path in mounts}
        outer = [path for path in paths if not (paths[path] and any(parent in read_only for parent in path.parents))]
        names = {path: f"host-{index}" for index, path in enumerate(outer)}
        self.volumes = [{"name": name, "hostPath": {"path": str(path)}} for path, name in names.items()]
        self.volume_mounts = [
            {"name": name, "mountPath": str(path), "readOnly": paths[path]} for path, name in names.items()
        ]

    def __enter__(self) -> "KubeCluster":
        self._binaries = build(self._cache)
        self.folder = Path(tempfile.mkdtemp(prefix="cenv-kube-"))
        self.kubeconfig = self.folder / "admin.kubeconfig"
        try:
            self._start()
        except Exception as error:
            logs = self._log_tails()
            self.close()
            raise RuntimeError(f"{error}\n{logs}") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # A kubelet ends the containers at once, but takes up to ten seconds more to release the objects.
            command = ("delete", "pods", "--all-namespaces", "--all", "--now", "--timeout=3s")
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                self.kubectl(*command, timeout=STOP_TIMEOUT)
        finally:
            self.close()

    def close(self) -> None:
        """End everything at once and remove it."""
        if self._guard and self._guard.returncode is None:
            self._guard.communicate("\n")  # a line, since a fork of this process may hold the pipe open
        for daemon in self._daemons.values():
            daemon.wait(STOP_TIMEOUT)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._guard and self._guard.returncode:
            raise RuntimeError(f"not all of {self.folder} could be removed; the guard's message is above")

    def kubectl(self, *args: str, input: str | None = None, timeout: float | None = None) -> str:
        """Run kubectl as the administrator and return its output; raise with its errors on failure."""
        own = ["--kubeconfig", self.kubeconfig, "--cache-dir", self.folder / "kubectl"]
        return _call([self._binaries / "kubectl", *own, *args], input=input, timeout=timeout)

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Stop this daemon (SIGSTOP) within the block."""
        outer = self._daemons[name].pid
        inner = int(Path(f"/proc/{outer}/task/{outer}/children").read_text())
        os.kill(inner, signal.SIGSTOP)
        try:
            # nsenter stops itself after its child is stopped; continued before that, it would stop later and stay so.
            while " T " not in Path(f"/proc/{outer}/stat").read_text():
                time.sleep(0.01)
            yield
        finally:
            os.kill(inner, signal.SIGCONT)
            os.kill(outer, signal.SIGCONT)

    def user(self, name: str) -> Path:
        """Return the kubeconfig of one of `users`, who have no rights."""
        if name not in self._users:
            raise KeyError(name)
        return self.folder / f"{name}.kubeconfig"

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", __file__, "guard", os.getpid(), self.folder, self._binaries / "pause"]
        self._guard = subprocess.Popen(
            [str(arg) for arg in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._guard.stdout
        self._first, self.host_address = json.loads(self._guard.stdout.readline() or "[null, null]")
        if not self._first:
            raise RuntimeError("the guard failed; see its message above")
        etcd_port, peer_port, api_port, kubelet_port = _free_ports(4)
        self._write_credentials(api_port)
        self._start_kubelet(kubelet_port)  # first, because it searches for Docker for five seconds
        self._start_containerd()
        self._start_apiserver(etcd_port, peer_port, api_port)
        self._import_images()
        self._wait("apiserver", lambda: self.kubectl("get", "--raw", "/readyz") == "ok")
        self._start_controllers()  # after the apiserver: without one they exit
        self._wait("node", self._node_ready)

    def _daemon(self, name: str, argv: Sequence[object], flags: Mapping[str, object]) -> None:
        enter = ["nsenter", "--target", self._first, "--mount", "--pid", *argv]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._daemons[name] = subprocess.Popen(
                [*map(str, enter), *(f"--{flag}={value}" for flag, value in flags.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"AWS_EC2_METADATA_DISABLED": "true"},  # a kubelet would ask it for credentials
            )

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        said = ""
        while True:
            try:
                if ready():
                    return
            except (RuntimeError, LookupError) as error:
                said = str(error)
            if ended := [name for name, daemon in self._daemons.items() if daemon.poll() is not None]:
                raise RuntimeError(f"{', '.join(ended)} ended while waiting for the {what}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the {what} is not ready after {START_TIMEOUT} s: {said}")
            time.sleep(0.1)

    def _log_tails(self) -> str:
        logs = {path.stem: path.read_text(errors="replace").splitlines()[-15:] for path in self.folder.glob("*.log")}
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in logs.items())

    def _write_credentials(self, api_port: int) -> None:
        """Write one self-signed certificate for all servers and the apiserver as a client, and a token per user."""
        self._key, self._certificate = self.folder / "key.pem", self.folder / "certificate.pem"
        extensions = [
            f"subjectAltName=IP:127.0.0.1,IP:{self.host_address},DNS:{NODE}",
            "keyUsage=critical,digitalSignature,keyCertSign",
            "extendedKeyUsage=serverAuth,clientAuth",
        ]
        _call(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            + ["-keyout", self._key, "-out", self._certificate, "-days", "2", "-subj", "/CN=apiserver"]
            + [part for extension in extensions for part in ("-addext", extension)]
        )
        self.api_port, self.authority = api_port, self._certificate.read_text()
        authority = b64encode(self.authority.encode()).decode()
        server = {"server": f"https://{self.host_address}:{api_port}", "certificate-authority-data": authority}
        rows = []
        for name in ("admin", *self._users):
            token = secrets.token_hex(16)
            rows.append(f'{token},{name},{name},"{"system:masters" if name == "admin" else ""}"\n')
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "test", "cluster": server}],
                "users": [{"name": name, "user": {"token": token}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
                "current-context": "test",
            }
            (self.folder / f"{name}.kubeconfig").write_text(json.dumps(config, indent=1))
        (self.folder / "tokens.csv").write_text("".join(rows))

    def _start_containerd(self) -> None:
        subnet, link = self.host_address.rpartition(".")[0], _link(self.folder)
        pods = {"subnet": f"{subnet}.0/24", "rangeEnd": f"{subnet}.250", "gateway": self.host_address}
        ipam = {
            "type": "host-local",
            "dataDir": str(self.folder / "addresses"),
            "ranges": [[pods]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        plugin = {"type": "bridge", "bridge": link, "isGateway": True, "ipam": ipam}
        network = {"cniVersion": "0.4.0", "name": link, "plugins": [plugin]}
        (self.folder / "cni").mkdir()
        (self.folder / "cni/10-test.conflist").write_text(json.dumps(network))
        # restrict_oom_score_adj: lowering a score needs a capability that root in a container lacks.
        (self.folder / "containerd.toml").write_text(
            f"""
            version = 2
            root = "{self.folder}/containerd"
            state = "/run/containerd"
            [grpc]
            address = "{self.folder}/containerd.sock"
            [plugins."io.containerd.grpc.v1.cri"]
            restrict_oom_score_adj = true
            sandbox_image = "docker.io/library/{PAUSE_IMAGE}"
            [plugins."io.containerd.grpc.v1.cri".cni]
            bin_dir = "/usr/lib/cni"
            conf_dir = "{self.folder}/cni"
            [plugins."io.containerd.grpc.v1.cri".containerd]
            snapshotter = "native"
            [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
            runtime_type = "io.containerd.runc.v2"
            [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
            BinaryName = "{RUN_PACKAGES["runc"]}"
            """
        )
        self._daemon("containerd", ["containerd"], {"config": self.folder / "containerd.toml"})

    def _import_images(self) -> None:
        links = {name: f"usr/{name}" for name in ("bin", "lib", "lib64", "sbin")}
        applets = _call(["busybox", "--list"]).split()
        tools = {f"usr/bin/{name}": "busybox" for name in applets} | {"usr/bin/busybox": Path("/bin/busybox")}
        folders = dict.fromkeys(("dev", "etc", "proc", "root", "sys", "tmp", "usr", "usr/bin"))
        users = {"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "etc/group": b"root:x:0:\n"}
        images = {name: self.folder / f"{name.partition(':')[0]}.tar" for name in (PAUSE_IMAGE, TEST_IMAGE)}
        _write_image(images[PAUSE_IMAGE], PAUSE_IMAGE, {"pause": self._binaries / "pause"}, Entrypoint=["/pause"])
        _write_image(images[TEST_IMAGE], TEST_IMAGE, folders | links | tools | users, Cmd=["/bin/sh"])
        control = ["ctr", "--address", self.folder / "containerd.sock", "--namespace", "k8s.io"]
        self._wait("containerd", lambda: bool(_call([*control, "version"])))
        for path in images.values():
            _call([*control, "images", "import", "--snapshotter", "native", path])

    def _start_apiserver(self, etcd_port: int, peer_port: int, api_port: int) -> None:
        client, peer = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
        etcd = {
            "data-dir": self.folder / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
        }
        self._daemon("etcd", ["etcd"], etcd)
        flags = {
            "etcd-servers": client,
            "bind-address": self.host_address,  # where pods reach it too
            "secure-port": api_port,
            "advertise-address": self.host_address,
            "endpoint-reconciler-type": "none",
            "service-cluster-ip-range": "10.89.0.0/24",
            "tls-cert-file": self._certificate,
            "tls-private-key-file": self._key,
            "token-auth-file": self.folder / "tokens.csv",
            "authorization-mode": "RBAC,Node",
            "disable-admission-plugins": "ServiceAccount,TaintNodesByCondition",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": self._certificate,
            "service-account-signing-key-file": self._key,
            "kubelet-client-certificate": self._certificate,
            "kubelet-client-key": self._key,
            "kubelet-certificate-authority": self._certificate,
            "kubelet-preferred-address-types": "Hostname",
        }
        self._daemon("apiserver", [self._binaries / "kube-apiserver"], flags)

    def _start_kubelet(self, port: int) -> None:
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": port,
            "healthzPort": 0,
            "tlsCertFile": str(self._certificate),
            "tlsPrivateKeyFile": str(self._key),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": str(self._certificate)},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.folder.name}",
            "enforceNodeAllocatable": [],
            "evictionHard": {},
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "makeIPTablesUtilChains": False,
            "nodeStatusUpdateFrequency": "1s",
            "resolvConf": str(self.folder / "resolv.conf"),
            "volumePluginDir": str(self.folder / "plugins"),
        }
        (self.folder / "kubelet.json").write_text(json.dumps(config))
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # lookups fail, and fail at once
        flags = {
            "config": self.folder / "kubelet.json",
            "kubeconfig": self.kubeconfig,
            "root-dir": self.folder / "kubelet",
            "container-runtime": "remote",
            "container-runtime-endpoint": f"unix://{self.folder}/containerd.sock",
            "hostname-override": NODE,
            "node-ip": self.host_address,
        }
        self._daemon("kubelet", [self._binaries / "kubelet"], flags)

    def _start_controllers(self) -> None:
        common = {"kubeconfig": self.kubeconfig, "leader-elect": "false", "port": 0, "secure-port": 0}
        manager = {"service-account-private-key-file": self._key, "node-monitor-period": "1s"}
        self._daemon("controller-manager", [self._binaries / "kube-controller-manager"], common | manager)
        self._daemon("scheduler", [self._binaries / "kube-scheduler"], common)

    def _node_ready(self) -> bool:
        node = json.loads(self.kubectl("get", "node", NODE, "-o", "json"))
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])
        return ready and not node["spec"].get("taints")


def _link(folder: Path) -> str:
    """Return the name of the bridge of the pods."""
    return "cenvk-" + folder.name[-8:]


def _guard(owner: int, folder: Path, pause: str) -> None:
    """Hold links, cgroups and namespaces until the owner writes a line or dies; then remove them all.

    It is a child process of the owner, and survives the owner's SIGKILL, os._exit (pytest-timeout) and Ctrl-C.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    link = _link(folder)
    taken = re.findall(rf"inet ({NETWORK}\.\d+)\.", _call(["ip", "address", "show"]))
    address = random.choice(sorted({f"{NETWORK}.{number}" for number in range(256)} - {*taken})) + ".254"
    fixed = "02:" + ":".join(f"{part:02x}" for part in secrets.token_bytes(5))  # else it changes when pods are added
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        _call(["ip", "link", "add", link, "address", fixed, "type", "bridge"])
        stack.callback(_remove_links, link)
        stack.callback(_remove_cgroups, folder.name)
        _call(["ip", "address", "add", f"{address}/24", "dev", link])
        _call(["ip", "link", "set", link, "up"])
        for hierarchy in _cgroup_hierarchies():
            (hierarchy / folder.name).mkdir()
        command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
        holder = subprocess.Popen(
            [*command, "sh", "-ec", _inside(folder, pause)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        stack.callback(holder.wait)
        assert holder.stdout
        if (said := holder.stdout.readline()) != "ready\n":
            raise RuntimeError(f"cannot make the namespaces: {said}{holder.stdout.read()}")
        first = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())
        process = os.pidfd_open(first)

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)  # and the kernel kills the rest before it is gone

        stack.callback(kill)
        owner_process = os.pidfd_open(owner)
        print(json.dumps([first, address]), flush=True)
        if os.getppid() == owner:  # otherwise it is dead, and its number may have been reused
            select.select([sys.stdin, owner_process], [], [])


def _inside(folder: Path, pause: str) -> str:
    """Return the script of the namespaces' first process, which becomes the pause program and reaps orphans."""
    lines = []
    for hidden in ("run", "var/lib", "var/log"):
        (folder / "root" / hidden).mkdir(parents=True)
        lines.append(f"mount --bind {folder}/root/{hidden} /{hidden}")
    for name, value in TUNABLES.items():
        shown = folder / "root" / name.replace("/", ".")
        shown.write_text(f"{value}\n")
        lines.append(f"mount --bind {shown} /proc/sys/{name}")
    return "\n".join([*lines, "echo ready", f"exec {pause} >/dev/null"])


def _remove_links(link: str) -> None:
    ports = json.loads(_call(["ip", "-j", "link", "show", "master", link]))
    for name in (*(port["ifname"] for port in ports), link):
        with contextlib.suppress(RuntimeError):  # the kernel removes a port together with its pod's namespace
            _call(["ip", "link", "del", name])


def _cgroup_hierarchies() -> list[Path]:
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [Path(mount[1]) for mount in mounts if mount[2] in ("cgroup", "cgroup2")]


def _remove_cgroups(name: str) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT
    for hierarchy in _cgroup_hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            while True:
                try:
                    Path(folder).rmdir()
                    break
                except OSError:  # busy for a moment after the death of its last process
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)


def _up() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), KubeCluster() as cluster:
        print(f"kubeconfig {cluster.kubeconfig}\nimage {cluster.image}")
        print(f"host address {cluster.host_address}", flush=True)
        signal.pause()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["build"]:
            print(build())
        case ["up"]:
            _up()
        case ["guard", owner, folder, pause]:
            _guard(int(owner), Path(folder), pause)
        case _:
            sys.exit("usage: kube.py build | up")
