//! The Debian packages for building the extension and running a server.
//!
//! Only missing packages are installed. The installation starts no service and creates no database cluster.

use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// The default major version: that of Debian 12.
pub const USUAL_MAJOR: &str = "15";

/// The environment variable that names another major version.
pub const MAJOR_VARIABLE: &str = "PG_FENCE_PG_MAJOR";

/// Returns the major version of the PostgreSQL under test.
pub fn major() -> String {
    std::env::var(MAJOR_VARIABLE).unwrap_or_else(|_| USUAL_MAJOR.to_owned())
}

/// A Debian package, and a file that it installs.
#[derive(Debug, Clone)]
pub struct Package {
    pub name: String,
    /// A file that exists once the package is installed. One `*` may stand for a part of the file's name.
    pub probe: String,
    /// A service that the package would enable, and that must not run.
    pub service: Option<&'static str>,
}

impl Package {
    /// Returns a package that counts as installed if `probe` exists.
    pub fn new(name: impl Into<String>, probe: impl Into<String>) -> Package {
        let (name, probe) = (name.into(), probe.into());
        Package { name, probe, service: None }
    }

    /// Leaves the package's service disabled when the package is installed.
    pub fn without_service(mut self, service: &'static str) -> Package {
        self.service = Some(service);
        self
    }

    /// Returns true if the package is installed.
    pub fn is_installed(&self) -> bool {
        let mut list = Command::new("sh");
        list.args(["-c", "ls -d $0", &self.probe]).stdout(Stdio::null()).stderr(Stdio::null());
        list.status().is_ok_and(|status| status.success())
    }
}

/// Returns the packages of Debian's PostgreSQL of that version: for running a server, and for building an extension.
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

/// Returns the packages needed with any server: for building the extension, beside Rust, and the user that runs
/// servers.
pub fn machine() -> Vec<Package> {
    vec![
        Package::new("postgresql-common", "/usr/share/postgresql-common"),
        Package::new("libclang-dev", "/usr/lib/llvm-*/lib/libclang.so"),
    ]
}

/// Returns the package of pg_repack for Debian's PostgreSQL of that version.
pub fn repack(major: &str) -> Package {
    Package::new(
        format!("postgresql-{major}-repack"),
        format!("/usr/lib/postgresql/{major}/bin/pg_repack"),
    )
}

/// Returns true if apt is available.
pub fn has_apt() -> bool {
    Path::new("/usr/bin/apt-get").exists()
}

/// Updates apt's package lists.
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

/// Installs the missing ones of `packages`. Without the right to do so, it fails with the command to run.
pub fn ensure(packages: &[Package]) -> Result<()> {
    // Tests run concurrently, and apt does not.
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
    // Everything goes to stderr: stdout is for the program's own output.
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

/// `$1` are the services to leave disabled, the other arguments the packages. Two temporary files keep the packages
/// from starting services (policy-rc.d) and from creating a database cluster.
const INSTALL: &str = r#"
set -eu
services=$1; shift
policy=/usr/sbin/policy-rc.d
dir=/etc/postgresql-common/createcluster.d
conf=$dir/pg_fence_tests.conf
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

/// Returns a shell with the right to install packages.
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
