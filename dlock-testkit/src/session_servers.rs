//! What the servers of ZooKeeper, etcd and Consul have in common: sessions that can be ended
//! from outside, and members that elect a leader.

use std::time::{Duration, Instant};

use crate::server_process::Process;

/// How long members may take to have a leader.
const ELECTION: Duration = Duration::from_secs(60);

/// A server whose locks live by the sessions of its clients.
#[expect(private_bounds, reason = "only servers of this crate are started by it")]
pub trait SessionServer: Process + Send + Sized + 'static {
    /// The scheme of its URLs.
    const SCHEME: &'static str;
    /// A ttl with time to spare, also on a busy machine.
    const LONG_TTL: Duration;
    /// The locks of a process that was killed are free after this time, if its session was
    /// one of two seconds.
    const FREED_WITHIN: Duration;
    /// Somebody gets a lock when this time has passed since an election.
    const PROGRESS_WITHIN: Duration;

    /// Starts one server; `None` if it is not installed, see
    /// [`servers::found`](crate::servers::found).
    ///
    /// # Panics
    /// If the server does not start.
    fn start() -> Option<Self>;

    /// The port of the server.
    fn port(&self) -> u16 {
        self.process().port
    }

    /// The URL of servers at these loopback ports, or of proxies in front of them.
    fn url_at(ports: &[u16]) -> String {
        let hosts: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("{}://{}", Self::SCHEME, hosts.join(","))
    }

    /// Ends all sessions that hold or wait for locks now, as an administrator may do. It
    /// returns when they are over.
    ///
    /// # Panics
    /// If they are not over after ten seconds.
    fn end_sessions(&self);

    /// The names of all that clients have at the store: sessions, keys, nodes. The record of
    /// who broke a lock does not count; it ends by itself.
    ///
    /// # Panics
    /// If the server does not answer at all.
    fn left(&self) -> Vec<String>;

    /// What this server knows of sessions and of what they have, for whoever looks why
    /// something is left; nothing if [`left`](Self::left) says all.
    fn report(&self) -> String {
        String::new()
    }
}

/// A member of a cluster.
pub(crate) trait Member: SessionServer {
    /// Whether it answers clients, which it does when there is a leader.
    fn serves(&self) -> bool;
    fn leads(&self) -> bool;
}

/// Servers that elect a leader.
#[derive(Debug)]
pub struct Members<S> {
    /// The members.
    pub servers: Vec<S>,
    /// The agent that clients use instead of the members, at Consul.
    pub agent: Option<S>,
}

#[expect(private_bounds, reason = "nobody else has a server to make a cluster of")]
impl<S: Member> Members<S> {
    /// Starts the members and waits until all of them serve.
    pub(crate) fn launched(mut servers: Vec<S>) -> Self {
        // Some accept connections only when there is a leader.
        std::thread::scope(|scope| {
            for server in &mut servers {
                scope.spawn(move || server.process_mut().launch());
            }
        });
        let members = Members { servers, agent: None };
        members.wait_until_all_serve();
        members
    }

    /// Waits until all members serve, and the agent that clients use.
    ///
    /// # Panics
    /// If they do not within a minute.
    pub fn wait_until_all_serve(&self) {
        self.servers.iter().chain(&self.agent).for_each(wait_until_it_serves);
    }

    /// The ports that clients connect to.
    pub fn ports(&self) -> Vec<u16> {
        match &self.agent {
            Some(agent) => vec![agent.port()],
            None => self.servers.iter().map(S::port).collect(),
        }
    }

    /// The URL of the cluster.
    pub fn url(&self) -> String {
        S::url_at(&self.ports())
    }

    /// The URL of proxies in front of what clients connect to.
    pub fn url_at(&self, ports: &[u16]) -> String {
        S::url_at(ports)
    }

    /// As [`SessionServer::end_sessions`].
    ///
    /// # Panics
    /// If they are not over after ten seconds.
    pub fn end_sessions(&self) {
        self.servers[self.leader()].end_sessions();
    }

    /// As [`SessionServer::left`].
    ///
    /// # Panics
    /// If the leader does not answer.
    pub fn left(&self) -> Vec<String> {
        self.servers[self.leader()].left()
    }

    /// As [`SessionServer::report`], of each member: they may not know the same.
    pub fn reports(&self) -> Vec<String> {
        self.servers.iter().map(S::report).filter(|report| !report.is_empty()).collect()
    }

    /// The number of the leader in [`servers`](Self::servers).
    ///
    /// # Panics
    /// If there is none within a minute.
    pub fn leader(&self) -> usize {
        self.leader_except(None)
    }

    /// The number of the leader, when this member does not lead any more because it was
    /// killed or paused.
    ///
    /// # Panics
    /// If there is none within a minute.
    pub fn next_leader(&self, former: usize) -> usize {
        self.leader_except(Some(former))
    }

    fn leader_except(&self, former: Option<usize>) -> usize {
        let began = Instant::now();
        loop {
            let mut members = self.servers.iter().enumerate();
            let leader = members.find(|(at, server)| Some(*at) != former && server.leads());
            if let Some((leader, _)) = leader {
                return leader;
            }
            assert!(began.elapsed() < ELECTION, "the cluster has no leader");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills a member with SIGKILL. Its files stay.
    pub fn kill(&mut self, number: usize) {
        self.servers[number].process_mut().kill();
    }

    /// Stops a member with SIGSTOP.
    pub fn pause(&self, number: usize) {
        self.servers[number].process().pause();
    }

    /// Starts the members again that were killed, lets those go on that were paused, and
    /// waits until all of them serve.
    ///
    /// # Panics
    /// If they do not within a minute.
    pub fn repair(&mut self) {
        for server in self.servers.iter_mut().map(S::process_mut) {
            if server.is_running() {
                server.resume();
            } else {
                server.launch();
            }
        }
        self.wait_until_all_serve();
    }
}

pub(crate) fn wait_until_it_serves<S: Member>(server: &S) {
    let began = Instant::now();
    while !server.serves() {
        assert!(began.elapsed() < ELECTION, "the server has no leader");
        std::thread::sleep(Duration::from_millis(20));
    }
}
