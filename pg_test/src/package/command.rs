//! The command `pg_fence`, for machines without a server: its own Debian package, and a `.tar.gz`. Both contain its
//! manual pages and its completions, which the command prints itself.
//!
//! The program is linked statically with musl, a C library. So it runs on any Linux, and alone in a container image.
//! (glibc cannot be linked in like that: to resolve a host name it loads the modules of `/etc/nsswitch.conf`, which fit
//! only the glibc that they were built with.)

use super::deb::{self, SOURCE};
use super::library::remapped;
use super::{Release, licenses, make_executable, put, settle, tarball, tools};
use crate::extension::NAME;
use crate::process::output_of;
use crate::setup::{self, Package};
use crate::source_tree;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const DESCRIPTION: &str = "run a program under a lease of PostgreSQL
 As flock does on one machine, for all machines of a PostgreSQL database that
 has the extension pg_fence: a cron job, a migration, a backup runs while it
 holds a lease, and is ended before the lease is somebody else's. What it writes
 presents a fencing token, so that the database refuses what comes too late.";

/// Findings of lintian that are intended.
const OVERRIDES: &str = "\
# It is not uploaded to Debian, whose list of wanted packages does not have it.
PACKAGE: initial-upload-closes-no-bugs *
# It is linked with nothing, so that one program is right in packages, tarballs and images.
PACKAGE: shared-library-lacks-prerequisites *
";

const CONTAINERFILE: &str =
    "FROM scratch\nCOPY bin/pg_fence /pg_fence\nENTRYPOINT [\"/pg_fence\"]\n";

/// The directories in which shells look for completions, below `share`.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "bash-completion/completions/pg_fence"),
    ("fish", "fish/vendor_completions.d/pg_fence.fish"),
    ("zsh", "zsh/vendor-completions/_pg_fence"),
];

/// The profile's settings. The command mostly waits for a server and for a program, so its size matters more than its
/// speed. A panic ends the process at once, and the run's other process then ends the program.
const SMALL: [(&str, &str); 5] = [
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "z"),
    ("CARGO_PROFILE_RELEASE_LTO", "fat"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
    ("CARGO_PROFILE_RELEASE_PANIC", "abort"),
    ("CARGO_PROFILE_RELEASE_STRIP", "symbols"),
];

/// Builds the command of a source tree below `target`, without traces of the build's paths.
pub fn build(source: &Path, target: &Path) -> Result<PathBuf> {
    let target = target.join("command");
    let triple = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    // Some crates contain C.
    setup::ensure(&[Package::new("musl-tools", "/usr/bin/musl-gcc")])?;
    ensure_target(&triple)?;
    eprintln!("building the command {NAME} for packages");
    let mut flags = remapped(source, &target)?;
    // Relative relocations are packed. The unwind tables are dropped: a program that aborts on panic never reads them.
    let script = source.join("pg_test/src/package/never_unwound.ld");
    let options = "-z,pack-relative-relocs,--no-eh-frame-hdr,-T";
    flags.push(format!("-Clink-arg=-Wl,{options},{}", script.display()));
    let status = source_tree::cargo()
        .current_dir(source)
        .args(["build", "--release", "--locked", "--package", "pg-fence-cli", "--target", &triple])
        .env("CARGO_TARGET_DIR", &target)
        .envs(SMALL)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env_remove("RUSTFLAGS")
        .stdin(Stdio::null())
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "building the command failed ({status})");
    Ok(target.join(triple).join("release").join(NAME))
}

/// Makes sure that Rust's standard library for that target is installed: rustup fetches it if it is missing.
fn ensure_target(triple: &str) -> Result<()> {
    let directory =
        output_of(Command::new("rustc").args(["--print", "target-libdir", "--target", triple]))?;
    if !Path::new(directory.trim()).exists() {
        output_of(Command::new("rustup").args(["target", "add", triple]))
            .with_context(|| format!("needed: rustup target add {triple}"))?;
    }
    Ok(())
}

/// Writes the Debian package and the tarball of that program into `output` and returns their paths.
pub fn write(program: &Path, release: &Release, output: &Path) -> Result<Vec<PathBuf>> {
    setup::ensure(&tools())?;
    let scratch = output.join(".command");
    let _ = fs::remove_dir_all(&scratch);
    let usr = scratch.join("deb/usr");
    let binary = install(program, &usr)?;
    for page in fs::read_dir(usr.join("share/man/man1"))? {
        deb::compress(&page?.path())?;
    }
    let package = deb::Package {
        name: SOURCE,
        depends: "",
        description: DESCRIPTION,
        overrides: OVERRIDES,
        third_party: licenses::third_party_of_command()?,
        binary,
    };
    let deb = package.write(release, &scratch, output, &["usr/bin/pg_fence"])?;

    let name = format!("{NAME}-command-{}-linux-{}", release.version, std::env::consts::ARCH);
    let root = scratch.join(&name);
    install(program, &root)?;
    put(&root.join("LICENSE"), licenses::read("LICENSE")?)?;
    put(&root.join("README.md"), licenses::read("clients/rust/cli/README.md")?)?;
    put(&root.join("THIRD-PARTY-LICENSES"), licenses::third_party_of_command()?)?;
    put(&root.join("Containerfile"), CONTAINERFILE)?;
    settle(&root, release)?;
    make_executable(&root.join("bin").join(NAME), release)?;
    let tar = output.join(format!("{name}.tar.gz"));
    tarball::pack(&scratch, &name, release.epoch, &tar)?;
    fs::remove_dir_all(&scratch)?;
    Ok(vec![deb, tar])
}

/// Installs the program, its manual pages and its completions below `usr`.
fn install(program: &Path, usr: &Path) -> Result<PathBuf> {
    let prints = |arguments: &[&str]| output_of(Command::new(program).args(arguments));
    let binary = usr.join("bin").join(NAME);
    put(&binary, fs::read(program)?)?;
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755))?;
    let pages = usr.join("share/man/man1");
    fs::create_dir_all(&pages)?;
    prints(&["man", "--directory", &pages.display().to_string()])?;
    for (shell, path) in COMPLETIONS {
        put(&usr.join("share").join(path), prints(&["completions", shell])?)?;
    }
    Ok(binary)
}
