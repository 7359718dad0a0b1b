//! Proxies that the environment names, as curl reads it: `http_proxy`, `https_proxy`, `all_proxy`, `no_proxy`.

use super::credentials::Credentials;
use super::url::HttpUrl;
use std::net::IpAddr;

/// A proxy for requests of HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Proxy {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) credentials: Option<Credentials>,
}

/// The proxy for a server, if there is one. `variable` reads the environment.
///
/// # Errors
/// The proxy's URL can't be read, or is of a kind that is not supported.
pub(super) fn proxy_for(
    url: &HttpUrl,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<Proxy>, String> {
    let first = |names: &[&'static str]| {
        let mut given = names.iter().map(|name| (*name, variable(name).unwrap_or_default()));
        given.find(|(_, value)| !value.is_empty())
    };
    // In capitals, a header of a client may have set it where a server runs programs (CVE-2016-5385).
    let own: &[&str] = if url.is_secure() { &["https_proxy", "HTTPS_PROXY"] } else { &["http_proxy"] };
    let Some((name, value)) = first(own).or_else(|| first(&["all_proxy", "ALL_PROXY"])) else {
        return Ok(None);
    };
    if first(&["no_proxy", "NO_PROXY"]).is_some_and(|(_, list)| is_excluded(&list, url)) {
        return Ok(None);
    }
    let text = if value.contains("://") { value } else { format!("http://{value}") };
    if !text.to_ascii_lowercase().starts_with("http://") {
        return Err(format!("{name}: only proxies of http:// are supported"));
    }
    let proxy = HttpUrl::parse(&text).map_err(|reason| format!("{name}: {reason}"))?;
    Ok(Some(Proxy {
        host: proxy.host().to_owned(),
        port: proxy.port(),
        credentials: proxy.credentials().cloned(),
    }))
}

/// Whether a list of `no_proxy` has the host: by its name, as a part of a domain, by its address or network, or by `*`.
fn is_excluded(list: &str, url: &HttpUrl) -> bool {
    let address = url.host().parse::<IpAddr>().ok();
    list.split([',', ' ']).map(str::trim).filter(|entry| !entry.is_empty()).any(|entry| {
        let with_port = entry.rsplit_once(':').filter(|(host, _)| !host.contains(':'));
        let (entry, port) = with_port.map_or((entry, None), |(host, port)| (host, port.parse::<u16>().ok()));
        if port.is_some_and(|port| port != url.port()) {
            return false;
        }
        if entry == "*" {
            return true;
        }
        let entry = entry.trim_start_matches("*.").trim_start_matches('.').to_ascii_lowercase();
        if let Some(address) = address {
            return is_in_network(&entry, address);
        }
        let rest = url.host().strip_suffix(entry.as_str());
        !entry.is_empty() && rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    })
}

fn is_in_network(entry: &str, address: IpAddr) -> bool {
    let (network, bits) = entry.split_once('/').unwrap_or((entry, ""));
    let Ok(network) = network.trim_matches(['[', ']']).parse::<IpAddr>() else { return false };
    let (all, network, address) = match (network, address) {
        (IpAddr::V4(network), IpAddr::V4(address)) => {
            (32, network.to_bits().into(), address.to_bits().into())
        }
        (IpAddr::V6(network), IpAddr::V6(address)) => (128, network.to_bits(), address.to_bits()),
        _ => return false,
    };
    let bits = if bits.is_empty() { Some(all) } else { bits.parse::<u32>().ok().filter(|bits| *bits <= all) };
    bits.is_some_and(|bits| {
        let cut = |value: u128| value.checked_shr(all - bits).unwrap_or(0);
        cut(network) == cut(address)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_says_which_proxy() {
        let ask = |url: &str, environment: &[(&str, &str)]| {
            let url = HttpUrl::parse(url).unwrap();
            let variable = |name: &str| {
                environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            proxy_for(&url, variable).map(|proxy| proxy.map(|proxy| format!("{}:{}", proxy.host, proxy.port)))
        };
        let http = ("http_proxy", "http://user:secret@p:3128/");
        assert_eq!(ask("http://h/x", &[http]), Ok(Some("p:3128".to_owned())));
        assert_eq!(ask("https://h/x", &[http]), Ok(None));
        assert_eq!(ask("http://h/x", &[("HTTP_PROXY", "p:1")]), Ok(None));
        assert_eq!(ask("https://h/x", &[("HTTPS_PROXY", "p:1")]), Ok(Some("p:1".to_owned())));
        assert_eq!(ask("https://h/x", &[("all_proxy", "p:1")]), Ok(Some("p:1".to_owned())));
        assert!(ask("http://h/x", &[("http_proxy", "socks5://p")]).unwrap_err().contains("http_proxy"));
        for (list, url, is_direct) in [
            ("h", "http://h/", true),
            ("example.org", "http://a.example.org/", true),
            (".example.org", "http://example.org/", true),
            ("example.org", "http://badexample.org/", false),
            ("a, *.b.org c", "http://x.b.org/", true),
            ("*", "http://h/", true),
            ("h:81", "http://h/", false),
            ("127.0.0.1", "http://127.0.0.1:8080/", true),
            ("10.0.0.0/8", "http://10.1.2.3/", true),
            ("10.0.0.0/8", "http://11.1.2.3/", false),
            ("0.0.0.0/0", "http://11.1.2.3/", true),
            ("::1", "http://[::1]/", true),
            ("fd00::/8", "http://[fd12::1]/", true),
            ("10.0.0.0/99", "http://10.0.0.0/", false),
            ("", "http://h/", false),
        ] {
            let direct = ask(url, &[http, ("no_proxy", list)]) == Ok(None);
            assert_eq!(direct, is_direct, "{list} {url}");
        }
    }
}
