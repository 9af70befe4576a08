//! Real cron daemons on two machines with the same crontab: every job of every minute must be done once.

use pg_test::clients::command::fixture::{CommandFixture, freeze, thaw};
use pg_test::process::{self, PATIENCE, output_of, wait_until};
use pg_test::setup::{self, Package};
use pg_test::skipped::left_out;
use pg_test::{Context, Harness, Result, bail, ensure, harness_test};
use rand::RngExt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The number of jobs, the same on each machine, every minute.
const JOBS: usize = 6;

const MACHINES: [&str; 2] = ["one", "two"];

/// The tables of the jobs, and the fence's own statistics.
const TABLES: &str = "
    CREATE TABLE counters (job text PRIMARY KEY, value bigint NOT NULL);
    SELECT fence_protect('counters', lease => '{job}');
    CREATE TABLE runs (n bigint GENERATED ALWAYS AS IDENTITY, job text, minute text, machine text, value bigint);
    SELECT fence_protect('runs', lease => '{job}');
";

/// The command that cron runs. A run that lost its lease, or whose write was refused, is repeated: another run may have
/// done the minute's work by then, which the job itself checks.
const CRONTAB_SCRIPT: &str = "#!/bin/sh
minute=$(date +%Y%m%d%H%M)
echo \"$JOB $minute $MACHINE\" >> \"$DIR/fired\"
echo $$ > \"$DIR/pids/$MACHINE-$JOB-$minute\"
# So that at any time some are running.
sleep $((${JOB#job-} * 8))
until \"$PG_FENCE\" run \"$JOB\" --ttl 3s --wait 20m --quiet -- sh \"$DIR/job.sh\" \"$minute\"; do
    echo \"$JOB $minute $MACHINE\" >> \"$DIR/again\"
    sleep 0.2
done 2>> \"$DIR/errors\"
rm \"$DIR/pids/$MACHINE-$JOB-$minute\"
";

/// The job reads a value, takes its time, and writes the next one, unless the minute's work is done. Two jobs that
/// overlap would lose a write, or do it twice; only the lease and the fence prevent it.
const JOB: &str = "minute=$1
done=$(psql -qAtXc \"SELECT count(*) FROM runs WHERE job = '$JOB' AND minute = '$minute'\") || exit 1
[ \"$done\" = 0 ] || exit 0
value=$(psql -qAtXc \"SELECT value FROM counters WHERE job = '$JOB'\") || exit 1
sleep $((2 + $(date +%N | cut -c9))).5
psql -qXv ON_ERROR_STOP=1 -1 -c \"UPDATE counters SET value = $((value + 1)) WHERE job = '$JOB'\" \\
    -c \"INSERT INTO runs (job, minute, machine, value) VALUES ('$JOB', '$minute', '$MACHINE', $((value + 1)))\"
";

/// Debian's cron with its own directories, in its own mount namespace: it reads and writes nothing of the system's.
const NAMESPACE: &str = "mount --bind \"$1/spool\" /var/spool/cron && mount --bind \"$1/cron.d\" /etc/cron.d && \
     mount --bind \"$1/crontab\" /etc/crontab && mount --bind \"$1/run\" /run && exec cron -f";

/// A cron daemon. All that it has started is ended with it.
struct Machine {
    cron: Child,
}

impl Machine {
    fn start(fixture: &CommandFixture, name: &str) -> Result<Machine> {
        let home = fixture.dir.join(name);
        for directory in ["spool/crontabs", "cron.d", "run"] {
            fs::create_dir_all(home.join(directory))?;
        }
        fs::write(home.join("crontab"), "")?;
        let crontab = home.join("spool/crontabs/root");
        fs::write(&crontab, crontab_of(fixture, name)?)?;
        fs::set_permissions(&crontab, fs::Permissions::from_mode(0o600))?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", NAMESPACE, "cron"]).arg(&home);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Ok(Machine { cron: command.spawn().context("unshare")? })
    }

    /// Returns the daemon and its descendants.
    fn processes(&self) -> Vec<i32> {
        process::family_of(self.cron.id() as i32)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for pid in self.processes() {
            let _ = process::signal(pid, nix::sys::signal::Signal::SIGKILL);
        }
        let _ = self.cron.wait();
    }
}

/// Returns a line for each job, below the variables with which the command and psql connect.
fn crontab_of(fixture: &CommandFixture, machine: &str) -> Result<String> {
    let command = fixture.command();
    let set = command
        .get_envs()
        .filter_map(|(name, value)| Some(format!("{}={}\n", name.to_str()?, value?.to_str()?)));
    let mut text: String = set.collect();
    let program = command.get_program().to_string_lossy().into_owned();
    text += &format!("PG_FENCE={program}\nMACHINE={machine}\nPGCONNECT_TIMEOUT=10\n");
    for job in 0..JOBS {
        text += &format!("* * * * * JOB=job-{job} sh {}\n", fixture.dir.join("cron.sh").display());
    }
    Ok(text)
}

fn lines(path: &Path) -> Vec<String> {
    fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// Runs for `PG_FENCE_CRON_MINUTES` minutes (2 by default).
#[harness_test(slow)]
fn the_jobs_of_two_crons_under_random_freezes_happen_once_a_minute(
    harness: &Harness,
) -> Result<()> {
    if !nix::unistd::geteuid().is_root()
        || output_of(Command::new("unshare").args(["--mount", "true"])).is_err()
    {
        return left_out("cron takes root, and a mount namespace");
    }
    setup::ensure(&[Package::new("cron", "/usr/sbin/cron").without_service("cron")])?;
    let minutes = std::env::var("PG_FENCE_CRON_MINUTES").ok().and_then(|text| text.parse().ok());
    let minutes: u64 = minutes.unwrap_or(2);
    let fixture = CommandFixture::new(harness)?;
    let mut admin = fixture.admin()?;
    let role = &fixture.servers.role;
    admin.run(TABLES)?;
    admin.run(&format!(
        "GRANT SELECT, INSERT, UPDATE ON counters, runs TO {role};
         SELECT fence_grant('{role}')"
    ))?;
    for job in 0..JOBS {
        admin.run(&format!(
            "INSERT INTO counters (job, value, fence) VALUES ('job-{job}', 0, lease_acquire('job-{job}'));
             SELECT lease_revoke('job-{job}')"
        ))?;
    }
    let dir: PathBuf = fixture.dir.to_owned();
    fs::create_dir(dir.join("pids"))?;
    fs::write(dir.join("cron.sh"), CRONTAB_SCRIPT)?;
    fs::write(dir.join("job.sh"), JOB)?;

    let crons: Vec<Machine> =
        MACHINES.iter().map(|name| Machine::start(&fixture, name)).collect::<Result<_>>()?;
    let until = Instant::now() + Duration::from_secs(60 * minutes + 5);
    let mut random = rand::rng();
    let mut freezes = 0;
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(random.random_range(50..600)));
        // Freezes all processes of one job on a machine, or any of them, but never cron itself, which must start the
        // jobs.
        let machine = &crons[random.random_range(0..crons.len())];
        let mut victims: Vec<i32> = machine.processes().split_off(1);
        victims.retain(|pid| !process::title(*pid).to_lowercase().contains("cron -f"));
        let share = random.random_range(1..4);
        victims.retain(|_| random.random_range(0..3) < share);
        // A process that has ended meanwhile cannot be frozen.
        victims.retain(|pid| freeze_now(*pid));
        freezes += victims.len();
        std::thread::sleep(Duration::from_millis(random.random_range(100..9000)));
        // The writer resumes first, as late as possible; the processes that would end it resume after it.
        victims.reverse();
        for pid in victims {
            let _ = thaw(pid);
            std::thread::sleep(Duration::from_millis(random.random_range(0..100)));
        }
    }
    // No more jobs are started, and the running ones end.
    for cron in &crons {
        freeze(cron.cron.id() as i32)?;
    }
    let pending = || fs::read_dir(dir.join("pids")).map_or(0, Iterator::count);
    // They begin one after the other, and several wait for one lease.
    let comes_to_its_end =
        |_| wait_until("the jobs come to their end", PATIENCE, || pending() == 0).is_ok();
    if !(0..5).any(comes_to_its_end) {
        bail!("{} jobs hang: {}", pending(), lines(&dir.join("errors")).join("\n"));
    }

    let fired = lines(&dir.join("fired"));
    let mut due: Vec<String> =
        fired.iter().filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned())).collect();
    due.sort();
    due.dedup();
    let done = admin.rows("SELECT job || ' ' || minute FROM runs ORDER BY job, minute")?;
    let done: Vec<String> = done.into_iter().filter_map(|row| row.into_iter().next()?).collect();
    let refused: i64 = admin.one(
        "SELECT refused_pf001 + refused_pf002 + refused_pf003 + refused_pf004 FROM fence.stats",
        &[],
    )?;
    eprintln!(
        "{} jobs and minutes, fired {} times; {freezes} processes frozen, {} runs tried again, {refused} late writes refused",
        due.len(),
        fired.len(),
        lines(&dir.join("again")).len(),
    );
    ensure!(done == due, "not once each: due {due:?}, done {done:?}");
    ensure!(
        due.len() as u64 >= minutes * JOBS as u64 && fired.len() > due.len(),
        "cron has not fired: {fired:?}"
    );
    ensure!(freezes > 0, "nothing was frozen");
    // A lost write would leave a gap in the numbers, and a stale one would set them back.
    let wrong = "SELECT count(*) FROM (SELECT value, row_number() OVER w AS wanted, fence < lag(fence) OVER w AS back
                 FROM runs WINDOW w AS (PARTITION BY job ORDER BY n)) AS r WHERE value <> wanted OR back";
    ensure!(admin.one::<i64>(wrong, &[])? == 0, "a write was lost or stale");
    let counted: i64 = admin.one("SELECT sum(value)::bigint FROM counters", &[])?;
    ensure!(counted == done.len() as i64, "{counted} counted, {} done", done.len());
    Ok(())
}

fn freeze_now(pid: i32) -> bool {
    process::signal(pid, nix::sys::signal::Signal::SIGSTOP).is_ok()
}
