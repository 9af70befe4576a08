//! The packages that a fresh Debian lacks: those to build the extension and to run a server.
//!
//! Only what is missing is installed, and nothing is started by it: no service, no database cluster.

use anyhow::{bail, ensure, Context, Result};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// The major version that the lab works with unless told otherwise: of Debian 12.
pub const USUAL_MAJOR: &str = "15";

/// Names another.
pub const MAJOR_VARIABLE: &str = "PG_FENCE_PG_MAJOR";

/// The major version of PostgreSQL that the lab works with.
pub fn major() -> String {
    std::env::var(MAJOR_VARIABLE).unwrap_or_else(|_| USUAL_MAJOR.to_owned())
}

/// A Debian package, and a file that it brings.
#[derive(Debug, Clone)]
pub struct Package {
    pub name: String,
    /// A file that is there once it is installed; one `*` may stand for part of a file's name.
    pub probe: String,
    /// A service that it would enable, which the lab does not want to run.
    pub service: Option<&'static str>,
}

impl Package {
    /// A package that is installed where `probe` exists.
    pub fn new(name: impl Into<String>, probe: impl Into<String>) -> Package {
        let (name, probe) = (name.into(), probe.into());
        Package { name, probe, service: None }
    }

    /// Leaves the package's service disabled when the lab installs it.
    pub fn without_service(mut self, service: &'static str) -> Package {
        self.service = Some(service);
        self
    }

    /// Whether it is there.
    pub fn is_installed(&self) -> bool {
        let mut list = Command::new("sh");
        list.args(["-c", "ls -d $0", &self.probe]).stdout(Stdio::null()).stderr(Stdio::null());
        list.status().is_ok_and(|status| status.success())
    }
}

/// Debian's PostgreSQL of that version: to run a server, and to build an extension for it.
pub fn packages_of(major: &str) -> Vec<Package> {
    vec![
        Package::new(
            format!("postgresql-{major}"),
            format!("/usr/lib/postgresql/{major}/bin/postgres"),
        ),
        Package::new(
            format!("postgresql-server-dev-{major}"),
            format!("/usr/include/postgresql/{major}/server/postgres.h"),
        ),
    ]
}

/// Packages that are needed whatever the server: to build the extension, beside Rust, and the user that servers run as.
pub fn machine() -> Vec<Package> {
    vec![
        Package::new("postgresql-common", "/usr/share/postgresql-common"),
        Package::new("libclang-dev", "/usr/lib/llvm-*/lib/libclang.so"),
    ]
}

/// The package that repacks tables of Debian's PostgreSQL of that version.
pub fn repack(major: &str) -> Package {
    Package::new(
        format!("postgresql-{major}-repack"),
        format!("/usr/lib/postgresql/{major}/bin/pg_repack"),
    )
}

/// Whether packages can be installed here.
pub fn has_apt() -> bool {
    Path::new("/usr/bin/apt-get").exists()
}

/// Has apt learn which packages there are.
pub fn update() -> Result<()> {
    let mut command = as_root().context("as root, run\n\n    apt-get update\n")?;
    let status = command
        .args(["-c", "apt-get -q update"])
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .status()?;
    ensure!(status.success(), "apt-get update failed ({status})");
    Ok(())
}

/// Installs those of `packages` that are missing; without the right to do so, says how and fails.
pub fn ensure(packages: &[Package]) -> Result<()> {
    // Tests run side by side, and apt stands no other.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let missing: Vec<&Package> = packages.iter().filter(|p| !p.is_installed()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|p| p.name.as_str()).collect();
    let by_hand = format!("apt-get install -y --no-install-recommends {}", names.join(" "));
    if !has_apt() {
        bail!("these Debian packages, or what they hold, are needed: {}", names.join(" "));
    }
    let Some(mut command) = as_root() else {
        bail!("packages are missing; as root, run\n\n    apt-get update && {by_hand}\n");
    };
    eprintln!("installing what is missing: {}", names.join(" "));
    let services: Vec<&str> = missing.iter().filter_map(|p| p.service).collect();
    // Everything goes to stderr: stdout belongs to what the lab was started for.
    let status = command
        .args(["-c", INSTALL, "install", &services.join(" ")])
        .args(&names)
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .status()
        .context("cannot start the installation")?;
    if !status.success() {
        bail!("the installation failed ({status}); by hand: {by_hand}");
    }
    if let Some(package) = missing.iter().find(|p| !p.is_installed()) {
        bail!("{} is installed, but {} is not there", package.name, package.probe);
    }
    Ok(())
}

/// `$1` are the services to leave disabled, the rest the packages. Two files keep the packages
/// from starting anything (policy-rc.d) and from making a database cluster; both go afterwards.
const INSTALL: &str = r#"
set -eu
services=$1; shift
policy=/usr/sbin/policy-rc.d
dir=/etc/postgresql-common/createcluster.d
conf=$dir/pg_fence_lab.conf
made_policy=
undo() {
    rm -f "$conf"
    rmdir --ignore-fail-on-non-empty "$dir" || :
    if [ -n "$made_policy" ]; then rm -f "$policy"; fi
}
trap undo EXIT
trap 'exit 1' HUP INT TERM
if [ ! -e "$policy" ]; then
    made_policy=yes
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod 755 "$policy"
fi
mkdir -p "$dir"
echo 'create_main_cluster = false' > "$conf"
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@"
if [ -n "$services" ] && [ -d /run/systemd/system ]; then
    systemctl disable --now $services || :
fi
"#;

/// A shell that has the right to install packages.
fn as_root() -> Option<Command> {
    if nix::unistd::geteuid().is_root() {
        return Some(Command::new("sh"));
    }
    may_sudo().then(|| {
        let mut sudo = Command::new("sudo");
        sudo.args(["-n", "sh"]);
        sudo
    })
}

fn may_sudo() -> bool {
    Command::new("sudo")
        .args(["-n", "true"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
