//! The process that keeps the lease, on connections of its own.
//!
//! Signals are blocked in it, and it is in no terminal's process group: as long as the command runs the lease is
//! renewed, whatever becomes of the supervisor. Where that is frozen or dead, it ends the command itself.

use super::cgroup::Cgroup;
use super::messages::{Order, Told};
use super::times::Times;
use super::{Options, adopted, line, processes};
use crate::arguments;
use crate::clock::Moment;
use crate::connection::Server;
use crate::failure::{Failure, Result, status};
use crate::{logger, planted};
use nix::sys::prctl::set_name;
use nix::sys::signal::Signal;
use nix::unistd::gethostname;
use pg_fence_client::{EventKind, Fence, Lease, LeaseRequest, LeaseTaken};
use std::io::{BufRead, IsTerminal, Write, stderr, stdin, stdout};
use std::sync::{Arc, Mutex, mpsc as std_mpsc};
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::types::Type;

/// Tokio's timers stand still while the machine sleeps: each wait looks at the clock again after this.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Between two looks whether what was killed is gone.
const DYING: Duration = Duration::from_millis(20);
/// Between two connections, while a database that is away is waited for.
const TRY_AGAIN: Duration = Duration::from_millis(500);
/// Who waits for less is not told for whom.
const SHOW_AFTER: Duration = Duration::from_millis(500);
/// As often in a row nothing of the command must be seen.
const LOOKS: usize = 3;
/// How long the end may take where nothing depends on it.
const GIVING_UP: Duration = Duration::from_secs(2);

pub fn keep(options: Options, times: Times, server: Server) -> Result<u8> {
    logger::start();
    // Not as the file that it was started by, `/proc/self/exe`. It is only for people.
    let _ = set_name(c"pg_fence");
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::system("the runtime", error))?;
    runtime.block_on(async {
        let said = Arc::new(Said::start());
        let keeper = Keeper { options, times, server, orders: listen(), said: said.clone() };
        keeper.keep().await;
        said.finish();
    });
    Ok(0)
}

/// Of this run, and of no other on this machine.
fn mark() -> String {
    std::env::var("PG_FENCE_RUN").unwrap_or_default()
}

/// By which a run finds itself among those that stand in line.
pub fn application_name() -> String {
    format!("pg_fence run {}", mark())
}

struct Keeper {
    options: Options,
    times: Times,
    server: Server,
    /// None is the supervisor's death.
    orders: mpsc::UnboundedReceiver<Order>,
    said: Arc<Said>,
}

impl Keeper {
    async fn keep(mut self) {
        let fence = self.fence();
        if let Err(Failure { status, message }) = self.try_to_keep(&fence).await {
            self.said.say(Told::Failed { status, message });
        }
    }

    async fn try_to_keep(&mut self, fence: &Fence) -> Result<()> {
        if let Some(token) = self.options.adopt {
            return self.keep_adopted(token).await;
        }
        if let Some(lease) = self.acquire(fence).await? {
            self.hold(lease).await;
        }
        Ok(())
    }

    /// Its renewals are told from its own thread.
    fn fence(&self) -> Fence {
        let said = self.said.clone();
        self.server.fence().on_event(move |event| {
            if let (EventKind::Renewed, Ok(now)) = (event.kind, Moment::now()) {
                said.say(Told::Renewed { deadline: now + event.remaining });
            }
        })
    }

    // For the lease

    /// Nothing where the supervisor wants it no more.
    async fn acquire(&mut self, fence: &Fence) -> Result<Option<Lease>> {
        let until = Moment::now()? + self.options.wait.0;
        let stop = |shown: &Option<JoinHandle<()>>| shown.iter().for_each(JoinHandle::abort);
        let shown = self.show_who_has_it();
        let mut request = self.request(fence);
        // The same is not told again and again.
        let mut told = String::new();
        let granted = loop {
            let granted = tokio::select! {
                granted = request.clone().wait(until.remaining()?).try_acquire() => granted,
                // Release, or the end: nobody wants it any more.
                _ = self.orders.recv() => {
                    stop(&shown);
                    // What is granted all the same is given back.
                    let _ = tokio::time::timeout(GIVING_UP, fence.close()).await;
                    return Ok(None);
                }
            };
            match granted.map_err(|error| Failure::of_client(&error)) {
                Err(failure) if failure.is_passing() && !until.has_passed()? => {
                    if failure.message != told {
                        log::warn!("{failure}: it is tried again");
                        told = failure.message;
                    }
                    // The answer to a grant may have been lost with the connection.
                    request = self.reclaiming(request);
                    tokio::time::sleep(TRY_AGAIN.min(until.remaining()?)).await;
                }
                granted => break granted?,
            }
        };
        stop(&shown);
        match granted {
            Ok(lease) => Ok(Some(lease)),
            Err(taken) => Err(Failure::new(status::TAKEN, self.taken(taken).await)),
        }
    }

    /// Says who has it, where that can be seen.
    async fn taken(&self, taken: LeaseTaken) -> String {
        let plain = format!("{} is taken", self.options.lease());
        let why = match (taken.holder, taken.remaining) {
            _ if self.options.quiet => None,
            (Some(holder), Some(left)) => {
                let left = Duration::from_secs(left.as_secs().max(1));
                Some(format!("held by {holder}, for {} more", humantime::format_duration(left)))
            }
            _ => line::kept_by(&self.server, &self.options.names, GIVING_UP).await,
        };
        why.map_or_else(|| plain.clone(), |why| format!("{plain}: {why}"))
    }

    fn request(&self, fence: &Fence) -> LeaseRequest {
        let options = &self.options;
        let mut request = fence.lease(options.names.as_slice());
        request = request.ttl(self.times.ttl).holder(self.holder());
        if options.shared {
            request = request.shared();
        }
        if let Some(slots) = options.slots {
            request = request.slots(slots);
        }
        if options.session {
            request = request.session();
        }
        if let Some(arguments::Duration(at_least)) = options.at_least {
            // By that a lease that runs out as it should is told from one whose holder has died.
            request = request.metadata(serde_json::json!({ "at_least": at_least.as_secs_f64() }));
        }
        request
    }

    /// Only by a name that nobody else has.
    fn reclaiming(&self, request: LeaseRequest) -> LeaseRequest {
        let is_alone = !self.options.shared && self.options.slots.is_none();
        let is_one = self.options.names.len() == 1;
        match self.options.holder {
            None if is_alone && is_one => request.reclaim(self.holder()),
            _ => request,
        }
    }

    fn holder(&self) -> String {
        let unique = || {
            let host = gethostname().unwrap_or_default();
            format!("{}/{}", host.to_string_lossy(), mark())
        };
        self.options.holder.clone().unwrap_or_else(unique)
    }

    /// On a terminal, by a connection of its own: the lease's is busy with waiting.
    fn show_who_has_it(&self) -> Option<JoinHandle<()>> {
        let is_wanted = !self.options.quiet && !self.options.wait.0.is_zero();
        if !is_wanted || !stderr().is_terminal() {
            return None;
        }
        let (server, said) = (self.server.clone(), self.said.clone());
        let names = self.options.names.clone();
        Some(tokio::spawn(async move {
            tokio::time::sleep(SHOW_AFTER).await;
            let Ok(connected) = server.connect().await else { return };
            while let Ok(told) = line::who_has(&connected, &names, server.application_name()).await
            {
                if let Some(told) = told {
                    said.say(told);
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }))
    }

    // With the lease

    async fn hold(&mut self, lease: Lease) {
        let Some(granted) = deadline_of(&lease) else { return };
        self.said.say(Told::Granted { token: lease.token(), deadline: Some(granted) });
        let since = Moment::now().ok();
        let mut group = None;
        let mut lost = std::pin::pin!(lease.lost());
        let order = loop {
            let deadline = deadline_of(&lease).unwrap_or(granted);
            let enforce_at = self.times.enforce_at(deadline);
            tokio::select! {
                biased;
                order = self.orders.recv() => match order {
                    Some(Order::Started { group: started }) => group = Some(started),
                    order => break order,
                },
                loss = &mut lost => {
                    if loss.is_some() {
                        self.said.say(Told::Lost);
                    }
                    let until = Moment::now().map(|now| now + self.times.patience());
                    let by = until.map_or(enforce_at, |at| at.min(enforce_at));
                    return self.see_it_ended(group, by).await;
                }
                // The client itself tells the loss at the deadline, which is too late for this. It may have been renewed.
                () = sleep_until(enforce_at), if !planted::NO_DEADLINE => {
                    let is_over = deadline_of(&lease).is_none_or(|now| now <= deadline);
                    if is_over {
                        self.said.say(Told::Lost);
                        return self.see_it_ended(group, enforce_at).await;
                    }
                }
            }
        };
        match order {
            // Dropped, it would be given back.
            Some(Order::Leave) => return std::mem::forget(lease),
            Some(_) => {}
            // The supervisor is dead.
            None => {
                let deadline = deadline_of(&lease).unwrap_or(granted);
                let kill_at = Moment::now().map(|now| now + self.times.grace);
                let kill_at = kill_at.map_or(deadline, |at| at.min(self.times.kill_at(deadline)));
                if !self.end(group, Signal::SIGTERM, kill_at).await {
                    return std::mem::forget(lease);
                }
            }
        }
        let left = since.zip(self.options.at_least).map(|(since, least)| since + least.0);
        match left.and_then(|until| until.remaining().ok()).filter(|left| !left.is_zero()) {
            None => drop(lease.release().await),
            Some(left) => self.leave(lease, left).await,
        }
    }

    /// Has it live on for so long.
    async fn leave(&self, lease: Lease, left: Duration) {
        let renew = self.server.function("lease_renew(n, $2, $3::text::interval)");
        let sql = format!("SELECT {renew} FROM unnest($1::text[]) AS n");
        let renewed = async {
            let connected = self.server.connect().await?;
            let (names, token) = (lease.names().to_vec(), lease.token());
            let left = format!("{} microseconds", left.as_micros());
            let arguments: crate::views::Arguments =
                &[(&names, Type::TEXT_ARRAY), (&token, Type::INT8), (&left, Type::TEXT)];
            connected.query_typed(&sql, arguments).await.map_err(Failure::of_driver)
        };
        match tokio::time::timeout(self.times.ttl / 3, renewed).await {
            Ok(Ok(_)) => {}
            Ok(Err(failure)) => log::warn!("the lease ends at its ttl: {failure}"),
            Err(_) => log::warn!("the lease ends at its ttl: the server did not answer in time"),
        }
        std::mem::forget(lease);
    }

    // With a lease that somebody else grants

    /// Nothing is given back at the end: the token is theirs, and so is its end.
    async fn keep_adopted(&mut self, token: i64) -> Result<()> {
        let mut adopting =
            adopted::Adopting::new(&self.server, &self.options.names[0], token, self.holder());
        let limit = self.times.ttl / 3;
        adopting.wait(self.options.wait.0, limit).await?;
        self.said.say(Told::Granted { token, deadline: None });
        let mut group = None;
        let mut look_at = Moment::now()? + limit;
        loop {
            tokio::select! {
                biased;
                order = self.orders.recv() => match order {
                    Some(Order::Started { group: started }) => group = Some(started),
                    Some(_) => return Ok(()),
                    None => {
                        let kill_at = Moment::now()? + self.times.grace;
                        self.end(group, Signal::SIGTERM, kill_at).await;
                        return Ok(());
                    }
                },
                () = sleep_until(look_at) => {
                    match adopting.look(limit).await {
                        Err(failure) if !failure.is_passing() => {
                            log::warn!("{failure}");
                            self.said.say(Told::Lost);
                            let by = Moment::now()? + self.times.patience();
                            self.see_it_ended(group, by).await;
                            return Ok(());
                        }
                        // The server judges what is written; its absence is no loss.
                        Err(failure) => log::warn!("{failure}"),
                        Ok(_) => {}
                    }
                    look_at = Moment::now()? + limit;
                }
            }
        }
    }

    /// It is the supervisor that ends the command. Where it has not by then, it is frozen.
    async fn see_it_ended(&mut self, mut group: Option<i32>, by: Moment) {
        loop {
            tokio::select! {
                biased;
                order = self.orders.recv() => match order {
                    Some(Order::Started { group: started }) => group = Some(started),
                    Some(_) => return,
                    None => break,
                },
                () = sleep_until(by) => break,
            }
        }
        self.end(group, Signal::SIGKILL, by).await;
    }

    /// Ends all that can be found of the command. Whether nothing is left.
    async fn end(&self, group: Option<i32>, first: Signal, kill_at: Moment) -> bool {
        if planted::NO_WATCHDOG {
            return true;
        }
        // The supervisor may have died before it told the group.
        let variable = format!("PG_FENCE_RUN={}", mark());
        let cgroup = Cgroup::find(&mark());
        let left = || {
            let mut all = processes::of_group_or_with(group, &variable);
            all.extend(cgroup.iter().flat_map(Cgroup::processes));
            all
        };
        let signal = |signal| {
            // Before all others: to look for processes takes a while on a busy machine.
            if signal == Signal::SIGKILL {
                cgroup.iter().for_each(Cgroup::kill);
            }
            processes::signal_all(&left(), group, signal);
        };
        signal(first);
        signal(Signal::SIGCONT);
        // What is born while one looks may be missed; it is no child of ours that we could wait for.
        while (0..LOOKS).any(|_| !left().is_empty()) {
            if kill_at.has_passed().unwrap_or(true) {
                signal(Signal::SIGKILL);
            }
            if (kill_at + GIVING_UP).has_passed().unwrap_or(true) {
                log::warn!("KILL does not end all of the command: the lease is left to its ttl");
                return false;
            }
            tokio::time::sleep(DYING).await;
        }
        cgroup.iter().for_each(Cgroup::remove);
        true
    }
}

async fn sleep_until(moment: Moment) {
    while !moment.has_passed().unwrap_or(true) {
        tokio::time::sleep(moment.remaining().unwrap_or_default().min(LOOK_AGAIN)).await;
    }
}

/// Rounded down: the clock is read before. A freeze in between makes it earlier, and never later.
fn deadline_of(lease: &Lease) -> Option<Moment> {
    let now = Moment::now().ok()?;
    Some(now + lease.remaining())
}

/// What the supervisor orders, until it is dead. A thread, since a pipe may block.
fn listen() -> mpsc::UnboundedReceiver<Order> {
    let (send, orders) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in stdin().lock().lines().map_while(std::io::Result::ok) {
            let Ok(order) = serde_json::from_str(&line) else { return };
            if send.send(order).is_err() {
                return;
            }
        }
    });
    orders
}

/// What is told to the supervisor, by a thread: it may be stopped for hours, and then reads nothing.
struct Said {
    words: std_mpsc::Sender<Option<Told>>,
    written: Mutex<std_mpsc::Receiver<()>>,
}

impl Said {
    fn start() -> Said {
        let (words, heard) = std_mpsc::channel::<Option<Told>>();
        let (end, written) = std_mpsc::channel();
        std::thread::spawn(move || {
            while let Ok(Some(told)) = heard.recv() {
                let Ok(line) = serde_json::to_string(&told) else { return };
                if writeln!(stdout(), "{line}").is_err() {
                    return;
                }
            }
            // Nobody waits any more where it took too long.
            let _ = end.send(());
        });
        Said { words, written: Mutex::new(written) }
    }

    fn say(&self, told: Told) {
        // Nobody hears it where the supervisor is dead.
        let _ = self.words.send(Some(told));
    }

    /// Waits until all has been written, unless the supervisor is frozen and reads nothing.
    fn finish(&self) {
        let _ = self.words.send(None);
        if let Ok(written) = self.written.lock() {
            let _ = written.recv_timeout(GIVING_UP);
        }
    }
}
