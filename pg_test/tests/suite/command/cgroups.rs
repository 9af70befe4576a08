//! The command's cgroups after a run, and runs without any.

use pg_test::clients::command::fixture::{CommandFixture, kill, needs_cgroups, play, program};
use pg_test::clients::command::scenarios;
use pg_test::process::{PATIENCE, output_of, wait_until};
use pg_test::{Harness, Result, ensure, harness_test};

/// As on a machine on which no cgroup can be made.
#[harness_test]
fn without_a_cgroup_descendants_and_marks_are_found(harness: &Harness) -> Result<()> {
    for scenario in
        [scenarios::frozen_renewer, scenarios::killed_supervisor, scenarios::left_behind]
    {
        play(harness, &program()?, None, "--no-cgroup", scenario)?;
    }
    Ok(())
}

/// Neither after a normal run, nor after the supervisor was killed.
#[harness_test]
fn no_cgroup_is_left_behind(harness: &Harness) -> Result<()> {
    needs_cgroups()?;
    let fixture = CommandFixture::new(harness)?;
    let script = "sed -n s/^0:://p /proc/self/cgroup > $DIR/cgroup; echo $$ > $DIR/pid; \
                  until [ -e $DIR/go ]; do sleep 0.05; done";
    let mount = "awk '$3 == \"cgroup2\" { printf \"%s\", $2; exit }' /proc/self/mounts";
    let mount = output_of(std::process::Command::new("sh").args(["-c", mount]))?;
    for is_killed in [false, true] {
        let run = fixture.run("job", script)?;
        fixture.pid("pid")?;
        let name = fixture.file("cgroup")?;
        let directory = std::path::PathBuf::from(format!("{mount}{name}"));
        ensure!(name.contains("/pg_fence-") && directory.is_dir(), "{directory:?}");
        if is_killed {
            kill(run.supervisor())?;
        } else {
            fixture.touch("go")?;
            run.ends_with(0)?;
        }
        wait_until("it is gone", PATIENCE, || !directory.exists())?;
        for file in ["pid", "cgroup", "go"] {
            let _ = std::fs::remove_file(fixture.dir.join(file));
        }
    }
    Ok(())
}
