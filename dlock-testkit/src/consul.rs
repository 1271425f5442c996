//! Real Consul servers, started by the tests that need them: in a temporary directory, on
//! free loopback ports, ended by their own process ids. One server, or a cluster of three
//! with an agent in front of it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::ports::free_port;
use crate::server_process::{Process, Server};
use crate::session_servers::{Member, Members, SessionServer, wait_until_it_serves};

/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(20);
/// The answer to whether an agent serves may take so long. One that passes the question on to
/// a stopped server does not answer.
const QUICK_ANSWER: Duration = Duration::from_secs(1);
/// What every agent of a test is told. The ports that are not here are free ones. With the
/// settings of the gossip and the time-out of requests it leaves a stopped server within two
/// seconds, and not after many (docs/consul.md).
const COMMON: &str = r#"
bind_addr = "127.0.0.1"
client_addr = "127.0.0.1"
session_ttl_min = "1s"
disable_update_check = true
leave_on_terminate = false
performance { raft_multiplier = 1 }
connect { enabled = false }
autopilot { cleanup_dead_servers = false }
limits {
  http_max_conns_per_client = 500
  rpc_client_timeout = "2s"
}
gossip_lan {
  probe_interval = "200ms"
  probe_timeout = "100ms"
  suspicion_mult = 2
}
"#;
/// Where clients have the fences of their sessions.
const FENCES: &str = "dlock/fences/";
const ALONE: &str = "server = true\nbootstrap_expect = 1\nnode_name = \"test\"\n";

/// An agent of Consul: a server, or one that passes requests on to servers. It is killed
/// when this value is dropped.
#[derive(Debug)]
pub struct ConsulServer {
    server: Server,
    program: PathBuf,
    ports: Ports,
    token: Option<String>,
}

/// The ports beside that for HTTP.
#[derive(Clone, Copy, Debug)]
struct Ports {
    https: Option<u16>,
    serf: u16,
    rpc: u16,
}

impl Ports {
    fn free() -> Self {
        Ports { https: None, serf: free_port(), rpc: free_port() }
    }
}

/// The program, which `scripts/build-consul` makes: the one in the cache of dlock, or
/// `consul` in the path.
pub fn program() -> Option<PathBuf> {
    let cached = crate::servers::cache().join("consul-1.20");
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let installed = std::env::split_paths(&paths).map(|path| path.join("consul"));
    let found = std::iter::once(cached).chain(installed).find(|path| path.exists());
    crate::servers::found("Consul", found.is_some()).then_some(())?;
    found
}

impl ConsulServer {
    /// Starts a server that keeps its data on disk and accepts sessions of a second or more;
    /// `None` if Consul is not installed, see [`found`](crate::servers::found).
    ///
    /// # Panics
    /// If the server does not start.
    pub fn start() -> Option<Self> {
        Some(Self::prepared(&program()?, ALONE, Ports::free()).launched())
    }

    /// Starts a server that asks for tokens, and knows one that may do everything.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn with_token(token: &str) -> Option<Self> {
        let settings = format!(
            "{ALONE}acl {{\n  enabled = true\n  default_policy = \"deny\"\n  \
             tokens {{\n    initial_management = \"{token}\"\n    agent = \"{token}\"\n  }}\n}}\n"
        );
        let mut server = Self::prepared(&program()?, &settings, Ports::free());
        server.token = Some(token.to_owned());
        Some(server.launched())
    }

    /// Starts a server that is also reached by TLS, and asks clients for a certificate. The
    /// files are in [`path`](Self::path): `ca.pem`, `client.pem`, `client-key.pem`.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn with_tls() -> Option<Self> {
        let program = program()?;
        let ports = Ports { https: Some(free_port()), ..Ports::free() };
        let server = Self::prepared(&program, ALONE, ports);
        let path = |name: &str| server.path(name);
        let make = |words: &[&str]| {
            let mut command = Command::new(&program);
            let made = command.args(words).current_dir(path("")).output().expect("consul runs");
            assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        };
        make(&["tls", "ca", "create"]);
        make(&["tls", "cert", "create", "-server", "-dc=dc1"]);
        make(&["tls", "cert", "create", "-client", "-dc=dc1"]);
        for (made, name) in [
            ("consul-agent-ca.pem", "ca.pem"),
            ("dc1-client-consul-0.pem", "client.pem"),
            ("dc1-client-consul-0-key.pem", "client-key.pem"),
        ] {
            std::fs::rename(path(made), path(name)).expect("a certificate");
        }
        let settings = format!(
            "tls {{\n  defaults {{\n    ca_file = \"{}\"\n    cert_file = \"{}\"\n    \
             key_file = \"{}\"\n  }}\n  https {{ verify_incoming = true }}\n}}\n",
            path("ca.pem"),
            path("dc1-server-consul-0.pem"),
            path("dc1-server-consul-0-key.pem"),
        );
        std::fs::write(path("tls.hcl"), settings).expect("the settings");
        let mut server = server;
        server.server.command.extend(["-config-file".to_owned(), server.path("tls.hcl")]);
        Some(server.launched())
    }

    fn prepared(program: &Path, settings: &str, ports: Ports) -> Self {
        let mut server = Server::new("consul");
        let file = server.path("settings.hcl");
        let https = ports.https.map_or(-1, i32::from);
        let all = format!(
            "{COMMON}{settings}ports {{\n  http = {}\n  https = {https}\n  dns = -1\n  grpc = -1\n  \
             grpc_tls = -1\n  serf_wan = -1\n  serf_lan = {}\n  server = {}\n}}\n",
            server.port, ports.serf, ports.rpc
        );
        std::fs::write(&file, all).expect("the settings");
        let words = ["agent", "-log-level=warn", "-config-file", &file, "-data-dir"];
        server.command = vec![program.display().to_string()];
        server.command.extend(words.map(str::to_owned));
        server.command.push(server.path("data"));
        ConsulServer { server, program: program.to_owned(), ports, token: None }
    }

    fn launched(mut self) -> Self {
        self.server.launch();
        wait_until_it_serves(&self);
        self
    }

    /// The port of the server for HTTP.
    pub fn port(&self) -> u16 {
        self.server.port
    }

    /// The port of the server for HTTP with TLS; zero if it has none.
    pub fn tls_port(&self) -> u16 {
        self.ports.https.unwrap_or(0)
    }

    /// The path of a file of the server.
    pub fn path(&self, name: &str) -> String {
        self.server.path(name)
    }

    /// The URL for tests: sessions of 2 s and no lock-delay.
    pub fn url(&self) -> String {
        url(self.port())
    }

    /// Kills the server with SIGKILL. Its files stay.
    pub fn kill(&mut self) {
        self.server.kill();
    }

    /// Stops the server or agent with SIGSTOP.
    pub fn pause(&self) {
        self.server.pause();
    }

    /// Starts the server again with its files, on the same port, and waits until it leads.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn restart(&mut self) {
        self.server.restart();
        wait_until_it_serves(self);
    }

    /// Kills the server and starts it again without its data.
    ///
    /// # Panics
    /// If the server does not start.
    pub fn restart_empty(&mut self) {
        self.server.kill();
        let _ = std::fs::remove_dir_all(self.server.path("data"));
        self.restart();
    }

    /// A command of the program `consul`, such as `kv get a`, to this server.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(words)
            .env("CONSUL_HTTP_ADDR", format!("127.0.0.1:{}", self.port()))
            .stdin(Stdio::null());
        if let Some(token) = &self.token {
            command.env("CONSUL_HTTP_TOKEN", token);
        }
        command
    }

    /// Runs a command of the program `consul`, and answers what it printed.
    ///
    /// # Errors
    /// What it printed as an error.
    ///
    /// # Panics
    /// If it cannot be run.
    pub fn run(&self, words: &[&str]) -> Result<String, String> {
        let output = self.command(words).output().expect("consul can be run");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Sends a request by itself and answers the body: `PUT /v1/session/destroy/..`.
    ///
    /// # Panics
    /// If there is no answer.
    pub fn http(&self, method: &str, path: &str) -> String {
        self.try_http(method, path, ANSWER).expect("an answer of Consul")
    }

    fn try_http(&self, method: &str, path: &str, within: Duration) -> std::io::Result<String> {
        let answer = self.try_send(method, path, within)?;
        let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.trim().to_owned());
        Ok(body.unwrap_or_default())
    }

    /// Sends a request as it is, such as one that a proxy held back, and answers what comes
    /// back.
    ///
    /// # Panics
    /// If there is no answer.
    pub fn deliver(&self, request: &[u8]) -> String {
        // Without a connection that is kept, the answer ends with it.
        let request = String::from_utf8_lossy(request).replacen("HTTP/1.1", "HTTP/1.0", 1);
        self.try_deliver(request.as_bytes(), ANSWER).expect("an answer of Consul")
    }

    /// The whole answer to a request.
    fn try_send(&self, method: &str, path: &str, within: Duration) -> std::io::Result<String> {
        let token = self.token.as_deref().unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: consul\r\nX-Consul-Token: {token}\r\nContent-Length: 0\r\n\r\n"
        );
        self.try_deliver(request.as_bytes(), within)
    }

    fn try_deliver(&self, request: &[u8], within: Duration) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port()))?;
        stream.set_read_timeout(Some(within))?;
        stream.write_all(request)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// The ids of all sessions.
    ///
    /// # Panics
    /// If the server does not answer.
    pub fn sessions(&self) -> Vec<String> {
        let listed: serde_json::Value =
            serde_json::from_str(&self.http("GET", "/v1/session/list")).expect("a list");
        let all = listed.as_array().into_iter().flatten();
        all.filter_map(|session| session["ID"].as_str().map(str::to_owned)).collect()
    }

    /// The keys of locks and semaphores: all but the fences of sessions, which are removed
    /// with their sessions.
    ///
    /// # Panics
    /// If the server does not answer.
    pub fn lock_keys(&self) -> Vec<String> {
        let is_fence = |key: &String| key.starts_with(FENCES);
        self.keys().into_iter().filter(|key| !is_fence(key)).collect()
    }

    /// All keys.
    ///
    /// # Panics
    /// If the server does not answer.
    pub fn keys(&self) -> Vec<String> {
        let body = self.http("GET", "/v1/kv/?keys");
        serde_json::from_str(&body).unwrap_or_default()
    }
}

/// Three servers, and an agent in front of them that clients use: it lives when a server is
/// killed.
pub type ConsulCluster = Members<ConsulServer>;

impl ConsulCluster {
    /// Starts a cluster; `None` if Consul is not installed.
    ///
    /// # Panics
    /// If it has no leader within a minute.
    pub fn start() -> Option<Self> {
        let program = program()?;
        let ports: Vec<Ports> = (0..4).map(|_| Ports::free()).collect();
        let join: Vec<_> =
            ports[..3].iter().map(|it| format!("\"127.0.0.1:{}\"", it.serf)).collect();
        let join = format!("retry_join = [{}]\nretry_interval = \"1s\"\n", join.join(", "));
        let prepared = |number: usize| {
            let role = match number {
                3 => "server = false\n",
                _ => "server = true\nbootstrap_expect = 3\n",
            };
            let settings = format!("{role}node_name = \"test-{number}\"\n{join}");
            ConsulServer::prepared(&program, &settings, ports[number])
        };
        let mut cluster = Self::launched((0..3).map(prepared).collect());
        cluster.agent = Some(prepared(3).launched());
        Some(cluster)
    }
}

impl Process for ConsulServer {
    fn process(&self) -> &Server {
        &self.server
    }

    fn process_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}

impl SessionServer for ConsulServer {
    const SCHEME: &'static str = "consul";
    const LONG_TTL: Duration = Duration::from_secs(20);
    // Consul ends a session after one to two ttls.
    const FREED_WITHIN: Duration = Duration::from_secs(14);
    const PROGRESS_WITHIN: Duration = Duration::from_secs(20);

    fn start() -> Option<Self> {
        Self::start()
    }

    fn url_at(ports: &[u16]) -> String {
        url(ports[0])
    }

    fn end_sessions(&self) {
        for id in self.sessions() {
            self.http("PUT", &format!("/v1/session/destroy/{id}"));
        }
    }

    fn left(&self) -> Vec<String> {
        [self.sessions(), self.keys()].concat()
    }
}

impl Member for ConsulServer {
    fn serves(&self) -> bool {
        // The leader answers, after it made sure that it leads. A write would do as well, but
        // one without an answer may be carried out later and leave its key.
        let answer = self.try_send("GET", "/v1/kv/ready?consistent", QUICK_ANSWER);
        answer.is_ok_and(|answer| answer.starts_with("HTTP/1.0 404"))
    }

    fn leads(&self) -> bool {
        let leader = self.try_http("GET", "/v1/status/leader", QUICK_ANSWER).unwrap_or_default();
        leader.trim_matches('"').ends_with(&format!(":{}", self.ports.rpc))
    }
}

/// The URL of a server at this port, or of a proxy in front of it, for tests: sessions of
/// 2 s and no lock-delay.
pub fn url(port: u16) -> String {
    format!("consul://127.0.0.1:{port}?ttl=2s&consul.session_ttl_min=1s&consul.lock_delay=0s")
}
