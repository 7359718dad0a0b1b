//! Places that have a registry's images: mirrors, and the registry itself.

use crate::failure::Failure;
use crate::mirror::Mirror;
use crate::options::OciOptions;
use std::io::Read;
use std::net::IpAddr;
use std::path::Path;
use zebu_remote::http::HttpUrl;

/// The largest `hosts.toml` that is read, in bytes.
const LARGEST: u64 = 1 << 20;
/// Docker's registry, which is at another host than its name says.
const DOCKER: (&str, &str) = ("docker.io", "registry-1.docker.io");

/// A place that is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// The URL that all others begin with: that of the host, and `/v2`.
    pub(crate) api: String,
    /// The registry's name, if this is a mirror of it.
    pub(crate) mirror_of: Option<String>,
    /// Whether it is asked without TLS if TLS fails.
    pub(crate) may_be_plain: bool,
}

/// The places of a registry's images, in the order in which they are asked.
///
/// # Errors
/// A `hosts.toml` can't be read.
pub(crate) fn places(registry: &str, options: &OciOptions) -> Result<Vec<Place>, Failure> {
    let mut found: Vec<Place> = Vec::new();
    for mirror in &options.mirrors {
        if mirror.registry.as_deref().is_none_or(|only| only == registry) {
            found.push(mirror_at(format!("{}/v2", mirror.url), registry));
        }
    }
    if let Some(directory) = &options.hosts {
        found.extend(of_file(directory, registry)?);
    }
    found.push(of_registry(registry, options));
    Ok(found)
}

/// The registry itself.
pub(crate) fn of_registry(registry: &str, options: &OciOptions) -> Place {
    let is_plain = options.plain_http.iter().any(|plain| plain.eq_ignore_ascii_case(registry));
    let host = if registry == DOCKER.0 { DOCKER.1 } else { registry };
    let scheme = if is_plain { "http" } else { "https" };
    let may_be_plain = !is_plain && is_this_machine(registry);
    Place { api: format!("{scheme}://{host}/v2"), mirror_of: None, may_be_plain }
}

fn mirror_at(api: String, registry: &str) -> Place {
    Place { api, mirror_of: Some(registry.to_owned()), may_be_plain: false }
}

fn is_this_machine(registry: &str) -> bool {
    let Ok(url) = HttpUrl::parse(&format!("http://{registry}")) else { return false };
    url.host() == "localhost" || url.host().parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Mirrors in containerd's file. Only what leads elsewhere is read: certificates are those of the command.
fn of_file(directory: &Path, registry: &str) -> Result<Vec<Place>, Failure> {
    let own = directory.join(registry.replace(':', "_")).join("hosts.toml");
    let names = [directory.join(registry).join("hosts.toml"), own, directory.join("_default/hosts.toml")];
    for path in names {
        let mut text = String::new();
        match std::fs::File::open(&path).and_then(|file| file.take(LARGEST).read_to_string(&mut text)) {
            Ok(_) => {
                return parse(&text, registry)
                    .map_err(|reason| Failure::new(libc::EINVAL, format!("{}: {reason}", path.display())));
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => {}
            Err(error) => return Err(Failure::of_file(&path.display().to_string(), &error)),
        }
    }
    Ok(Vec::new())
}

fn parse(text: &str, registry: &str) -> Result<Vec<Place>, String> {
    let file = text.parse::<toml::Table>().map_err(|error| error.message().to_owned())?;
    let Some(hosts) = file.get("host") else { return Ok(Vec::new()) };
    let hosts = hosts.as_table().ok_or("'host' is no table")?;
    let mut found = Vec::new();
    for (url, settings) in hosts {
        let pulls = settings
            .get("capabilities")
            .and_then(toml::Value::as_array)
            .is_none_or(|all| all.iter().any(|one| one.as_str() == Some("pull")));
        if !pulls {
            continue;
        }
        let has_scheme = url.contains("://");
        let url = if has_scheme { url.clone() } else { format!("https://{url}") };
        let mirror: Mirror = url.parse()?;
        let is_whole = settings.get("override_path").and_then(toml::Value::as_bool).unwrap_or(false);
        let api = if is_whole { mirror.url } else { format!("{}/v2", mirror.url) };
        found.push(mirror_at(api, registry));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apis(registry: &str, options: &OciOptions) -> Vec<String> {
        places(registry, options).unwrap().into_iter().map(|place| place.api).collect()
    }

    #[test]
    fn mirrors_come_before_the_registry() {
        let mirrors =
            ["http://m:5000/", "h=https://other/prefix"].map(|text| text.parse::<Mirror>().unwrap());
        let options = OciOptions::default().mirrors(mirrors.to_vec()).plain_http(vec!["p:80".to_owned()]);
        assert_eq!(apis("h", &options), ["http://m:5000/v2", "https://other/prefix/v2", "https://h/v2"]);
        assert_eq!(apis("p:80", &options), ["http://m:5000/v2", "http://p:80/v2"]);
        let none = OciOptions::default();
        assert_eq!(apis("docker.io", &none), ["https://registry-1.docker.io/v2"]);
        assert!(
            of_registry("127.0.0.1:5000", &none).may_be_plain && of_registry("[::1]:1", &none).may_be_plain
        );
        assert!(
            of_registry("localhost", &none).may_be_plain && !of_registry("localhost.x", &none).may_be_plain
        );
        for (wrong, word) in [
            ("m", "http"),
            ("=http://m", "registry"),
            ("http://u:secret@m", "user"),
            ("http://m?x", "query"),
            ("ftp://m", "scheme"),
        ] {
            let error = wrong.parse::<Mirror>().unwrap_err();
            assert!(error.contains(word) && !error.contains("secret"), "{wrong}: {error}");
        }
    }

    #[test]
    fn files_of_containerd_are_read_in_their_order() {
        let dir = tempfile::tempdir().unwrap();
        let options = OciOptions::default().hosts(dir.path().to_owned());
        assert_eq!(apis("h:5000", &options), ["https://h:5000/v2"]);
        std::fs::create_dir(dir.path().join("h:5000")).unwrap();
        let path = dir.path().join("h:5000/hosts.toml");
        let text = "server = \"https://h:5000\"\n[host.\"http://z:1\"]\ncapabilities = [\"pull\", \"resolve\"]\n\
                    [host.\"https://push\"]\ncapabilities = [\"push\"]\n[host.a]\noverride_path = true\n";
        std::fs::write(&path, text).unwrap();
        assert_eq!(apis("h:5000", &options), ["http://z:1/v2", "https://a", "https://h:5000/v2"]);
        std::fs::write(&path, "host = 1").unwrap();
        assert!(places("h:5000", &options).unwrap_err().reason.contains("hosts.toml"));
    }
}
