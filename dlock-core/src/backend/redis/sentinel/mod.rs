//! The Sentinels that know where the primary is.
//!
//! All of them are asked at each connection, at the same time. Which answer is believed
//! is decided in `answers`; a switch of the primary is heard in `watch`.

mod answers;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::{Client, RedisError, Value, cmd};
use tokio::task::JoinSet;
use tokio::time::Instant;
use url::Url;

use self::answers::{Answer, Named, Primary, decide, names, read};
pub(super) use self::watch::watch;
use super::address::Address;
use super::connector::{Endpoint, TlsFiles, settings};
use super::errors;
use crate::backend::{ServerRole, ServerState};
use crate::config::{HostPort, SentinelConfig, Settings, parse_url};
use crate::error::{Error, ErrorKind, Operation, Result};

/// How long the first answer may take.
const FIRST_ANSWER: Duration = Duration::from_millis(1_000);
/// How long the others have after it. One of them may know better.
const OTHER_ANSWERS: Duration = Duration::from_millis(300);

/// The Sentinels of one primary.
pub(super) struct Sentinels {
    sentinels: Vec<Endpoint>,
    /// The name under which they know the primary.
    name: String,
    /// The primary that was believed last.
    believed: Mutex<Option<Named>>,
}

impl Sentinels {
    /// The Sentinels that a `redis+sentinel://` URL names.
    pub(super) fn configured(config: &Settings, url: &Url) -> Result<Arc<Self>> {
        let hosts = parse_url(config.url.as_deref().unwrap_or(url.as_str()))?.hosts;
        let name = url.path().trim_matches('/').split('/').next().unwrap_or("");
        let name = percent_encoding::percent_decode_str(name).decode_utf8_lossy().into_owned();
        if name.is_empty() {
            return Err(Error::config(
                "the URL does not name the primary; write the name that the Sentinels know it by after the hosts: redis+sentinel://host1,host2,host3/mymaster",
            ));
        }
        let tls = config.sentinel.tls.unwrap_or(url.scheme() == "rediss+sentinel");
        let files = config.sentinel_tls_files(tls);
        let endpoint = |host: &HostPort| endpoint(host, tls, &files, &config.sentinel);
        let sentinels = hosts.iter().map(endpoint).collect::<Result<_>>()?;
        Ok(Arc::new(Sentinels { sentinels, name, believed: Mutex::new(None) }))
    }

    /// How the server is called in messages.
    pub(super) fn shown(&self) -> String {
        format!("the primary `{}`", self.name)
    }

    /// The primary by the answer that is to be believed.
    ///
    /// # Errors
    /// `Unavailable` if no Sentinel answers or those that do know too little, `Config` if
    /// they do not know the name or are no Sentinels, `Denied` if they refuse the user.
    pub(super) async fn primary(&self) -> Result<Primary> {
        let answers = self.ask_all().await;
        let mut believed = self.believed.lock();
        let named = decide(&self.name, believed.as_ref(), self.sentinels.len(), &answers)?;
        Ok(believed.insert(named).primary.clone())
    }

    /// The address of the primary that was believed last.
    pub(super) fn believed(&self) -> Option<String> {
        self.believed.lock().as_ref().map(|named| named.primary.to_string())
    }

    /// What each Sentinel says.
    pub(super) async fn states(&self) -> Vec<ServerState> {
        let answers = self.ask_all().await;
        let believed = self.believed();
        let silent = |shown: &str| answers.iter().all(|(known, _)| known != shown);
        let told = answers.iter().map(|(shown, answer)| {
            let note = match answer {
                Answer::Primary(Named { primary, .. }) => {
                    let named = primary.to_string();
                    (believed.as_ref() != Some(&named))
                        .then(|| format!("it says that {named} is the primary"))
                }
                Answer::Unknown { .. } => Some(format!("it knows no primary `{}`", self.name)),
                Answer::NotASentinel => Some("it is not a Sentinel".to_owned()),
                Answer::Failed(error) => Some(error.to_string()),
            };
            (shown.clone(), note)
        });
        let late = self.sentinels.iter().filter(|it| silent(it.shown()));
        let late = late.map(|it| (it.shown().to_owned(), Some("no answer in time".to_owned())));
        let role = ServerRole::Sentinel;
        told.chain(late)
            .map(|(address, note)| ServerState { address, role, behind: None, note })
            .collect()
    }

    /// Whether this is another server than the primary that was believed last.
    fn is_elsewhere(&self, host: &str, port: u16) -> bool {
        let believed = self.believed.lock();
        believed
            .as_ref()
            .is_some_and(|Named { primary, .. }| primary.host != host || primary.port != port)
    }

    /// Whether a failover made this the primary after the one that was believed last.
    fn is_newer(&self, primary: &Primary) -> bool {
        self.believed.lock().as_ref().is_some_and(|named| primary.epoch > named.primary.epoch)
    }

    /// Whether this was named by a Sentinel of other servers.
    fn is_foreign(&self, named: &Named) -> bool {
        self.believed.lock().as_ref().is_some_and(|believed| !named.is_of_group_of(believed))
    }

    /// Asks all Sentinels. Returns soon after the first has named a primary.
    async fn ask_all(&self) -> Vec<(String, Answer)> {
        let mut asked = JoinSet::new();
        let mut answers = Vec::with_capacity(self.sentinels.len());
        for endpoint in &self.sentinels {
            let (shown, name) = (endpoint.shown().to_owned(), self.name.clone());
            match endpoint.client().await {
                Ok(client) => drop(asked.spawn(async move {
                    let answer = ask(&client, &name, &shown).await;
                    (shown, answer)
                })),
                Err(error) => answers.push((shown, Answer::Failed(error))),
            }
        }
        let mut until = Instant::now() + FIRST_ANSWER;
        while let Ok(Some(answered)) = tokio::time::timeout_at(until, asked.join_next()).await {
            let Ok(answer) = answered else { continue };
            if matches!(answer.1, Answer::Primary(_)) {
                until = until.min(Instant::now() + OTHER_ANSWERS);
            }
            answers.push(answer);
        }
        answers
    }

    /// The error of a server that the Sentinels name and that cannot be reached.
    pub(super) fn unreachable(&self, error: &RedisError, address: &str) -> Error {
        let unreachable = errors::unreachable(error, address);
        if unreachable.kind() != ErrorKind::Unavailable {
            return unreachable;
        }
        Error::new(ErrorKind::Unavailable, Operation::Connect).with_message(format!(
            "cannot reach {address}, where the Sentinels say that the primary `{}` is ({}); if this address is wrong for this machine, set `replica-announce-ip` on the servers and `sentinel announce-ip` on the Sentinels",
            self.name,
            if error.is_io_error() { error.to_string() } else { error.category().to_owned() },
        ))
    }
}

fn endpoint(
    (host, port): &HostPort,
    tls: bool,
    files: &TlsFiles,
    config: &SentinelConfig,
) -> Result<Endpoint> {
    let address = Address::of(host, *port, tls)?;
    let address = address.with_user(config.user.as_deref(), config.password.as_deref());
    Endpoint::new(address, files, config.password_file.clone(), None)
}

/// Asks one Sentinel. The address comes from the command that knows of a promotion under
/// way; the epoch only from the other one.
async fn ask(client: &Client, name: &str, shown: &str) -> Answer {
    let connected = client.get_multiplexed_async_connection_with_config(&settings()).await;
    let mut connection = match connected {
        Ok(connection) => connection,
        Err(error) => return Answer::Failed(errors::unreachable(&error, shown)),
    };
    let mut state = cmd("SENTINEL");
    state.arg("MASTER").arg(name);
    let mut address = cmd("SENTINEL");
    address.arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    let mut own_id = cmd("SENTINEL");
    own_id.arg("MYID");
    let mut others = cmd("SENTINEL");
    others.arg("SENTINELS").arg(name);
    let mut reply_to = async |command: &redis::Cmd| {
        let answer = connection.send_packed_command(command).await;
        answer.map_err(|error| errors::unanswered(Operation::Connect, &error))
    };
    let (state, address) = match (reply_to(&state).await, reply_to(&address).await) {
        (Ok(state), Ok(address)) => (state, address),
        (Err(error), _) | (_, Err(error)) => return Answer::Failed(error),
    };
    let own_id = reply_to(&own_id).await.unwrap_or(Value::Nil);
    let others = reply_to(&others).await.unwrap_or(Value::Nil);
    match read(&state, &address, &own_id, &others) {
        Answer::Unknown { .. } => {
            let mut all = cmd("SENTINEL");
            all.arg("MASTERS");
            Answer::Unknown { known: names(&reply_to(&all).await.unwrap_or(Value::Nil)) }
        }
        answer => answer,
    }
}
