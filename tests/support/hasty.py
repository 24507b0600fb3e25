"""patchkit with less patience: a way in that is lost is given up after two seconds, not twenty."""

from patchkit.cli import main
from patchkit.cluster.net import net_history

net_history._BACK_SECONDS = 2.0
main()
